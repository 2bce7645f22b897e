"""Costs of stages along one topological order of the pieces, on each device class: what `stage_beam` reads.

A cut is a position in the order, from 0 to the number of pieces. A stage has the pieces between two cuts.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tvm_split.placement.problem import TOLERANCE
from tvm_split.placement.search.instance import Floats, Instance
from tvm_split.placement.search.stage_costs import shared_seconds
from tvm_split.placement.step_graph import MachineSet

ROUNDING = 1e-12
"""Relative excess over a limit that is only rounding: sums of a thousand terms in another order differ by less."""


class DeviceClasses:
    """K device classes: of identical machines, or of sets of machines that are replicas of one stage.

    Args:
        sets: sets of machines, each a class of its own; by default the classes of single machines.

    Attributes:
        members: the sets of each class, of one machine or several. counts: (K,) their number.
        seconds: (n, K) seconds of each piece under contention, shared by speed; infinite if it cannot run there.
        memory_bytes, transfer_seconds, transfer_seconds_per_byte: (K,) of the machine of a set that limits it.
        seconds_per_byte: (K + 1, K + 1) from one class to another; infinite if they are not linked. The last row and
            column are the client's. Between sets it is that of the slowest link.
        speed_group, link_group: (K,) numbers, equal for classes with equal seconds, or equal links to all others.
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
        self.memory_bytes = np.array([instance.memory_bytes[machines].min() for machines in first])
        self.transfer_seconds, self.transfer_seconds_per_byte = (
            np.array([values[machines].max() for machines in first])
            for values in (instance.transfer_seconds, instance.transfer_seconds_per_byte)
        )
        seconds_per_byte, latency = instance.class_links
        self.seconds_per_byte: Floats = np.where(np.isinf(latency), math.inf, seconds_per_byte)
        if sets:
            class_of = {machine: index for index, members in enumerate(instance.classes) for machine in members}
            ends = [[class_of[machine] for machine in machines] for machines in first] + [[len(instance.classes)]]
            rows = np.stack([self.seconds_per_byte[classes].max(axis=0) for classes in ends])
            self.seconds_per_byte = np.stack([rows[:, classes].max(axis=1) for classes in ends], axis=1)
        self.speed_group = np.unique(self.seconds, axis=1, return_inverse=True)[1].ravel()
        links = self.seconds_per_byte[:-1].copy()
        alone = np.flatnonzero(self.counts == 1)  # a link to itself says nothing
        links[alone, alone] = math.inf
        links[alone, alone] = links[alone].min(axis=1)
        self.link_group = np.unique(links, axis=0, return_inverse=True)[1].ravel()


class OrderCosts:
    """Transfers and sizes of the stages between any two of P cuts of the pieces in their order.

    A sent tensor counts once, as if all of its readers outside the stage were in one other stage.

    Attributes:
        received, sent: bytes [first cut, last cut] from and to other stages. from_client, to_client: from and to the
            client. bytes: the sum of the four. tensors: the number of all these tensors.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        length = len(instance.pieces)
        shape = (length + 2, length + 2)  # the last row and column take differences that lie behind the cuts
        received, sent, from_client, to_client, tensors = tables = [np.zeros(shape) for _ in range(5)]
        for tensor in instance.tensors:
            ends = sorted(piece for piece in tensor.destinations if piece != instance.client)
            source = tensor.source
            into = from_client if source == instance.client else received
            # Stages that begin after the source and after the previous reader, and that contain this reader.
            before_each = zip([source, *ends], ends, strict=False)
            stages = [(into, (before + 1, end + 1, end + 1, length + 1)) for before, end in before_each]
            if ends and source != instance.client:
                stages.append((sent, (0, source + 1, source + 1, ends[-1] + 1)))
            if instance.client in tensor.destinations:
                stages.append((to_client, (0, source + 1, source + 1, length + 1)))
            for table, rectangle in stages:
                _add(table, rectangle, tensor.bytes)
                _add(tensors, rectangle, 1.0)
        for table in tables:
            np.cumsum(np.cumsum(table, axis=0, out=table), axis=1, out=table)
            table[table < TOLERANCE * table.max(initial=0.0)] = 0.0  # rounding errors of the differences
        self.received, self.sent, self.from_client, self.to_client, self.tensors = tables
        self.bytes = received + sent + from_client + to_client
        self._weight_bytes = np.concatenate([[0.0], np.cumsum(instance.weight_bytes)])

    def memory_bytes(self, start: int, end: int) -> Floats:
        """Return the bytes of memory of stages from the cut ``start`` to start + 1 … end."""
        columns = slice(start + 1, end + 1)
        weights = self._weight_bytes[columns] - self._weight_bytes[start]
        largest = np.maximum.accumulate(self.instance.activation_bytes[start:end])
        return np.asarray(weights + largest + self.instance.problem.buffers * self.bytes[start, columns])


def _add(table: Floats, rectangle: tuple[int, int, int, int], value: float) -> None:
    """Add a value to rows top … bottom − 1 and columns left … right − 1, as differences for later cumulative sums."""
    top, bottom, left, right = rectangle
    table[top, left] += value
    table[bottom, left] -= value
    table[top, right] -= value
    table[bottom, right] += value


class ComputeRuns:
    """Compute times of runs of pieces between any two of P cuts, on K classes of machines.

    Args:
        seconds: (P − 1, K) seconds of each piece on each class; infinite where it cannot run.

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
