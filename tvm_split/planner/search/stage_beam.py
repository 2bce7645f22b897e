"""Beam search of stages for many machines: under a period limit, each stage goes to the machine that it fills best.

A partial plan, along a topological order, is the end of its last stage and the machines that are left. Prices of
machine time and of pieces come from `bounds.fair_prices`. A stage wastes the price of its machine's time minus the
price of its pieces; after each stage, the partial plans with the least waste are kept. If all machines are identical,
each stage simply takes as many pieces as it can. If all are different, nearly any run of pieces nearly fills one. The
caller finds the least period by binary search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.bounds import Prices
from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.candidate import Placement
from tvm_split.planner.search.instance import Flags, Floats, Instance
from tvm_split.planner.search.stage_costs import shared_seconds
from tvm_split.planner.step_graph import MachineSet

ROUNDING = 1e-12
"""Relative excess over a limit that is only rounding: sums of a thousand terms in another order differ by less."""


class ClassCosts:
    """K classes of identical machines, or of sets of machines that are replicas of one stage.

    Args:
        sets: sets of machines, each a class of its own; by default the classes of single machines.

    Attributes:
        members: the sets of each class, of one machine or several. counts: (K,) their number.
        seconds: (n, K) seconds of each piece under contention, shared by speed; infinite if it cannot run there.
        memory, transfer_seconds, transfer_seconds_per_byte: (K,) of the machine of a set that limits it.
        seconds_per_byte: (K + 1, K + 1) from one class to another; infinite if they are not linked. The last row and
            column are the client's. Between sets it is that of the slowest link.
        speeds, places: (K,) numbers, equal for classes with equal seconds, and with equal links to all others.
    """

    def __init__(self, instance: Instance, sets: Sequence[MachineSet] = ()) -> None:
        singles = tuple(tuple((machine,) for machine in members) for members in instance.classes)
        self.members: tuple[tuple[MachineSet, ...], ...] = tuple((machines,) for machines in sets) or singles
        self.counts = np.array([len(members) for members in self.members], dtype=np.intp)
        first = [list(members[0]) for members in self.members]
        seconds = instance.seconds * instance.contention
        self.seconds: Floats = np.stack(
            [shared_seconds([(seconds[:, machine], 1) for machine in machines]) for machines in first], axis=1
        )
        self.memory, self.transfer_seconds, self.transfer_seconds_per_byte = (
            np.array([limit(values[machines]) for machines in first])
            for values, limit in (
                (instance.memory_bytes, np.min),
                (instance.transfer_seconds, np.max),
                (instance.transfer_seconds_per_byte, np.max),
            )
        )
        seconds_per_byte, latency = instance.class_links
        self.seconds_per_byte: Floats = np.where(np.isinf(latency), math.inf, seconds_per_byte)
        if sets:
            class_of = {machine: index for index, members in enumerate(instance.classes) for machine in members}
            ends = [[class_of[machine] for machine in machines] for machines in first] + [[len(instance.classes)]]
            rows = np.stack([self.seconds_per_byte[classes].max(axis=0) for classes in ends])
            self.seconds_per_byte = np.stack([rows[:, classes].max(axis=1) for classes in ends], axis=1)
        self.speeds = np.unique(self.seconds, axis=1, return_inverse=True)[1].ravel()
        links = self.seconds_per_byte[:-1].copy()
        alone = np.flatnonzero(self.counts == 1)  # a link to itself says nothing
        links[alone, alone] = math.inf
        links[alone, alone] = links[alone].min(axis=1)
        self.places = np.unique(links, axis=0, return_inverse=True)[1].ravel()


class OrderCosts:
    """Tables of the transfers and sizes of stages along one topological order.

    Row: first cut of a stage; column: its last cut.

    A sent tensor counts once per reader outside the stage, as if all readers were in different stages. With
    ``together``, it counts once.

    Attributes:
        received, sent: (P, P) bytes from and to other stages. from_client, to_client: bytes from and to the client.
        tensors: (P, P) number of tensors that the stage receives and sends.
    """

    def __init__(self, instance: Instance, order: Sequence[int], *, together: bool = False) -> None:
        self.instance = instance
        self.order = np.array(order, dtype=np.intp)
        length = len(order)
        place = np.empty(length, dtype=np.intp)
        place[self.order] = np.arange(length)
        shape = (length + 1, length + 1)
        self.received, self.sent, self.from_client, self.to_client, self.tensors = (np.zeros(shape) for _ in range(5))
        for tensor in instance.tensors:
            ends = sorted(int(place[piece]) for piece in tensor.destinations if piece != instance.client)
            source = -1 if tensor.source == instance.client else int(place[tensor.source])
            into = self.from_client if source < 0 else self.received
            # Stages that begin after the source and after the previous reader, and that contain this reader.
            for before, end in zip([source, *ends], ends, strict=False):
                for table, value in ((into, tensor.bytes), (self.tensors, 1.0)):
                    _rectangle(table, before + 1, end + 1, end + 1, length + 1, value)
            if source < 0:
                continue
            for end in ends[-1:] if together else ends:
                _rectangle(self.sent, 0, source + 1, source + 1, end + 1, tensor.bytes)
                _rectangle(self.tensors, 0, source + 1, source + 1, end + 1, 1.0)
            if instance.client in tensor.destinations:
                for table, value in ((self.to_client, tensor.bytes), (self.tensors, 1.0)):
                    _rectangle(table, 0, source + 1, source + 1, length + 1, value)
        for table in (self.received, self.sent, self.from_client, self.to_client, self.tensors):
            np.cumsum(np.cumsum(table, axis=0, out=table), axis=1, out=table)
            table[table < TOLERANCE * table.max(initial=0.0)] = 0.0  # rounding errors of the differences
        self.bytes = self.received + self.sent + self.from_client + self.to_client
        self.weights = np.concatenate([[0.0], np.cumsum(instance.weight_bytes[self.order])])
        self.activations = instance.activation_bytes[self.order]

    def held(self, start: int, end: int) -> Floats:
        """Return the bytes of memory of stages from the cut ``start`` to start + 1 … end."""
        columns = slice(start + 1, end + 1)
        weights = self.weights[columns] - self.weights[start]
        largest = np.maximum.accumulate(self.activations[start:end])
        return np.asarray(weights + largest + self.instance.problem.buffers * self.bytes[start, columns])


def _rectangle(table: Floats, top: int, bottom: int, left: int, right: int, value: float) -> None:
    """Add a value to rows top … bottom − 1 and columns left … right − 1, as differences for later cumulative sums."""
    size = len(table)
    table[top, left] += value
    if bottom < size:
        table[bottom, left] -= value
    if right < size:
        table[top, right] -= value
        if bottom < size:
            table[bottom, right] += value


class Stretches:
    """Compute times of runs of pieces in one order of P − 1 pieces.

    Args:
        seconds: (P − 1, K) seconds of each piece on every class of machines; infinite where it cannot run.

    Attributes:
        prefix: (K, P) seconds of all pieces before a cut that the class can run.
    """

    def __init__(self, seconds: Floats) -> None:
        blocked = np.isinf(seconds.T)
        class_count, length = blocked.shape
        start = np.zeros((class_count, 1))
        self.prefix: Floats = np.concatenate([start, np.cumsum(np.where(blocked, 0.0, seconds.T), axis=1)], axis=1)
        # The first cut, at or after each cut, whose next piece cannot run; the last cut if there is none.
        ends = np.concatenate([np.where(blocked, np.arange(length), length), np.full((class_count, 1), length)], axis=1)
        self._ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]

    def end(self, class_index: int, start: int, period: float) -> int:
        """Return the last cut up to which all pieces from ``start`` compute within the period on one class."""
        limit = self.prefix[class_index, start] + period * (1 + ROUNDING)
        fitting = np.searchsorted(self.prefix[class_index], limit, side="right") - 1
        return int(min(fitting, self._ends[class_index, start]))

    def reach(self, period: float) -> npt.NDArray[np.intp]:
        """Return (K, P): for each cut, the last cut up to which all pieces between them compute within the period."""
        limit = period * (1 + ROUNDING)
        longest = np.stack([np.searchsorted(prefix, prefix + limit, side="right") - 1 for prefix in self.prefix])
        return np.asarray(np.minimum(longest, self._ends), dtype=np.intp)


Counts = npt.NDArray[np.intp]
STEP_WORK = 500
"""Units of work to extend one partial plan by a stage, per class of machines."""


@dataclass(frozen=True)
class _Partial:
    """A partial plan: pieces up to ``end`` are placed; ``class_index`` is the last stage's class, or K."""

    end: int
    class_index: int
    left: Counts
    waste: float
    before: _Partial | None


class StageBeam:
    """Beam search over one order of pieces; see the module.

    Args:
        prices: prices of the machines' time and of the pieces, which are in the order of the instance.
        width: number of partial plans that are kept.
    """

    def __init__(self, costs: OrderCosts, machines: ClassCosts, prices: Prices, width: int) -> None:
        self._costs = costs
        self._machines = machines
        self._width = width
        self._length = len(costs.order)
        self._stretches = Stretches(machines.seconds[costs.order])
        self._value = np.concatenate([[0.0], np.cumsum(prices.pieces[costs.order])])
        self._price = prices.classes
        links = machines.seconds_per_byte
        self._into, self._outof = links[:-1, :-1].min(axis=0), links[:-1, :-1].min(axis=1)
        self._tables: dict[int, Flags] = {}
        self._reach: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    def stages(self, period: float, most: int, usable: Counts, budget: Budget) -> list[Placement] | None:
        """Return stages on at most ``most`` of the ``usable`` machines (by class) under a period; None if none fit."""
        self._tables, self._reach = {}, self._stretches.reach(period)
        machines = self._machines
        partials = [_Partial(0, len(machines.members), usable, 0.0, None)]
        for _ in range(most):
            if budget.is_used_up:
                return None
            # Plans that differ only in the choice among machines of equal speed are one, else they fill the beam.
            following: dict[tuple[int, int, bytes], _Partial] = {}
            for partial in partials:
                budget.spend(STEP_WORK * len(self._price))
                for grown in self._grown(partial, period):
                    if grown.end == self._length:
                        return self._placed(grown)
                    left = np.bincount(machines.speeds, grown.left).tobytes()
                    key = grown.end, int(machines.places[grown.class_index]), left
                    if key not in following or grown.waste < following[key].waste:
                        following[key] = grown
            partials = sorted(following.values(), key=lambda partial: partial.waste)[: self._width]
            if not partials:
                return None
        return None

    def _table(self, start: int, period: float) -> Flags:
        """Return (K, W): whether each class can hold the pieces from ``start`` to each of the next W cuts."""
        possible = self._tables.get(start)
        if possible is not None:
            return possible
        costs, machines, instance = self._costs, self._machines, self._costs.instance
        links, reach = machines.seconds_per_byte, int(self._reach[:, start].max())
        columns = slice(start + 1, reach + 1)
        size = costs.bytes[start, columns]
        compute = self._stretches.prefix[:, columns] - self._stretches.prefix[:, start, None]
        if instance.transfer_seconds.any() or instance.transfer_seconds_per_byte.any():
            compute = compute + machines.transfer_seconds[:, None] * costs.tensors[start, columns]
            compute = compute + machines.transfer_seconds_per_byte[:, None] * size
        possible = (compute <= period) & (np.arange(start + 1, reach + 1) <= self._reach[:, start, None])
        if instance.memory_bytes.min() < math.inf:
            possible &= costs.held(start, reach) <= machines.memory[:, None] * (1 + ROUNDING)
        for sizes, client, best in (
            (costs.received, costs.from_client[start, columns], (links[-1, :-1], self._into)),
            (costs.sent, costs.to_client[start, columns], (links[:-1, -1], self._outof)),
        ):
            possible &= _wire(client, best[0]) + _wire(sizes[start, columns], best[1]) <= period
        self._tables[start] = possible
        return possible

    def _grown(self, partial: _Partial, period: float) -> list[_Partial]:
        """Return the partial plans with one more stage: the longest possible one on each class that is left."""
        start, costs = partial.end, self._costs
        classes = np.flatnonzero((partial.left > 0) & (self._reach[:, start] > start))
        if not len(classes):
            return []
        table = self._table(start, period)
        columns = slice(start + 1, start + 1 + table.shape[1])
        possible = table[classes]
        if partial.class_index < len(self._price):
            arriving = self._machines.seconds_per_byte[partial.class_index, classes]
            possible &= _wire(costs.received[start, columns], arriving) <= period
        longest = table.shape[1] - possible[:, ::-1].argmax(axis=1)
        able = possible.any(axis=1)
        classes, ends = classes[able], start + longest[able]
        waste = partial.waste + self._price[classes] * period - (self._value[ends] - self._value[start])
        chosen = np.argsort(waste, kind="stable")[: 2 * self._width]
        done = np.flatnonzero(ends == self._length)
        if len(done):
            chosen = done[:1]
        partials = []
        for at in chosen.tolist():
            remaining = partial.left.copy()
            remaining[classes[at]] -= 1
            partials.append(_Partial(int(ends[at]), int(classes[at]), remaining, float(waste[at]), partial))
        return partials

    def _placed(self, last: _Partial) -> list[Placement]:
        steps = [last]
        while steps[-1].before is not None:
            steps.append(steps[-1].before)
        waiting = [iter(members) for members in self._machines.members]
        placements = []
        for before, step in itertools.pairwise(reversed(steps)):
            held = sorted(self._costs.order[before.end : step.end].tolist())
            placements.append(Placement(next(waiting[step.class_index]), tuple(held)))
        return placements


def _wire(sizes: Floats, seconds_per_byte: Floats) -> Floats:
    """Return (K, W) seconds to transfer bytes over each link; 0 for no bytes, even without a link."""
    with np.errstate(invalid="ignore"):
        return np.where(sizes > 0, sizes * seconds_per_byte[:, None], 0.0)
