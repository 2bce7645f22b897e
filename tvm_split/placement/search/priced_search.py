"""Search for the least period on more machines than tables can hold: beam searches inside a binary search of periods.

Stages follow an order of the pieces, without replicas or with two of each stage: larger sets won in none of 18 problems
of 16 to 1,024 machines. Of machines on oversubscribed cores, it uses only as many as have cores of their own. This
loses nothing if pieces are small, and needs fewer transfers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.placement.problem import TOLERANCE
from tvm_split.placement.search.bounds import Prices, client_bound, fair_prices, longest_latency
from tvm_split.placement.search.budget import EVALUATION_WORK, Budget
from tvm_split.placement.search.candidate import Candidate, Placement, scheduled, tried
from tvm_split.placement.search.instance import Flags, Floats, Instance
from tvm_split.placement.search.order_costs import ROUNDING, ComputeRuns, DeviceClasses, OrderCosts

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
    """Beam search of stages for many machines: under a period limit, each stage goes to the machine that it fills best.

    A partial plan, along a topological order, is the end of its last stage and the machines that are left. Prices of
    machine time and of pieces come from `bounds.fair_prices`. A stage wastes the price of its machine's time minus the
    price of its pieces; after each stage, the partial plans with the least waste are kept. If all machines are
    identical, each stage simply takes as many pieces as it can. If all are different, nearly any run of pieces nearly
    fills one. The caller finds the least period by binary search. For example, four pieces on one fast and two slow
    machines, in 4 s::

        piece                    p0    p1    p2    p3
        seconds, fast machine     1     1     2     2     a second costs 0.5
        seconds, slow machine     2     4     1     4     a second costs 0.25
        price of the piece      0.5   0.5  0.25     1     the cheaper machine's

        first stage    second stage                       waste
        slow: p0                                          0.25 × 4 − 0.5 = 0.5
                       slow: p1                           0.5 + 1 − 0.5 = 1
                       fast: p1 p2                        0.5 + 0.5 × 4 − 0.75 = 1.75
        fast: p0 p1 p2                                    0.5 × 4 − 1.25 = 0.75
                       slow: p3                           all pieces are placed: the plan

    Args:
        prices: prices of the machines' time and of the pieces, which are in the order of the instance.
        width: number of partial plans that are kept.
    """

    def __init__(self, costs: OrderCosts, machines: DeviceClasses, prices: Prices, width: int) -> None:
        self._costs = costs
        self._machines = machines
        self._width = width
        self._length = len(machines.seconds)
        self._runs = ComputeRuns(machines.seconds)
        self._value = np.concatenate([[0.0], np.cumsum(prices.pieces)])
        self._price = prices.classes
        links = machines.seconds_per_byte
        self._best_in, self._best_out = links[:-1, :-1].min(axis=0), links[:-1, :-1].min(axis=1)
        self._fits_from: dict[int, Flags] = {}
        self._reach: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    def stages(self, period: float, most: int, usable: Counts, budget: Budget) -> list[Placement] | None:
        """Return stages on at most ``most`` of the ``usable`` machines (by class) under a period; None if none fit."""
        self._fits_from, self._reach = {}, self._runs.reach(period)
        machines = self._machines
        partials = [_Partial(0, len(machines.members), usable, 0.0, None)]
        for _ in range(most):
            if budget.is_used_up:
                return None
            # Plans that differ only in the choice among machines of equal speed are one, else they fill the beam.
            following: dict[tuple[int, int, bytes], _Partial] = {}
            for partial in partials:
                budget.spend(STEP_WORK * len(self._price))
                for extended in self._extended(partial, period):
                    if extended.end == self._length:
                        return self._placed(extended)
                    left = np.bincount(machines.speed_group, extended.left).tobytes()
                    key = extended.end, int(machines.link_group[extended.class_index]), left
                    if key not in following or extended.waste < following[key].waste:
                        following[key] = extended
            partials = sorted(following.values(), key=lambda partial: partial.waste)[: self._width]
            if not partials:
                return None
        return None

    def _fits(self, start: int, period: float) -> Flags:
        """Return (K, W): whether each class can hold the pieces from ``start`` to each of the next W cuts."""
        possible = self._fits_from.get(start)
        if possible is not None:
            return possible
        costs, machines, instance = self._costs, self._machines, self._costs.instance
        links, reach = machines.seconds_per_byte, int(self._reach[:, start].max())
        columns = slice(start + 1, reach + 1)
        compute = self._runs.prefix[:, columns] - self._runs.prefix[:, start, None]
        compute = compute + machines.transfer_seconds[:, None] * costs.tensors[start, columns]
        compute = compute + machines.transfer_seconds_per_byte[:, None] * costs.bytes[start, columns]
        possible = (compute <= period) & (np.arange(start + 1, reach + 1) <= self._reach[:, start, None])
        if instance.memory_bytes.min() < math.inf:
            possible &= costs.memory_bytes(start, reach) <= machines.memory_bytes[:, None] * (1 + ROUNDING)
        for sizes, client, best in (
            (costs.received, costs.from_client[start, columns], (links[-1, :-1], self._best_in)),
            (costs.sent, costs.to_client[start, columns], (links[:-1, -1], self._best_out)),
        ):
            possible &= _transfer_seconds(client, best[0]) + _transfer_seconds(sizes[start, columns], best[1]) <= period
        self._fits_from[start] = possible
        return possible

    def _extended(self, partial: _Partial, period: float) -> list[_Partial]:
        """Return the partial plans with one more stage: the longest possible one on each class that is left."""
        start, costs = partial.end, self._costs
        classes = np.flatnonzero((partial.left > 0) & (self._reach[:, start] > start))
        if not len(classes):
            return []
        fits = self._fits(start, period)
        columns = slice(start + 1, start + 1 + fits.shape[1])
        possible = fits[classes]
        if partial.class_index < len(self._price):
            arriving = self._machines.seconds_per_byte[partial.class_index, classes]
            possible &= _transfer_seconds(costs.received[start, columns], arriving) <= period
        longest = fits.shape[1] - possible[:, ::-1].argmax(axis=1)
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
            placements.append(Placement(next(waiting[step.class_index]), tuple(range(before.end, step.end))))
        return placements


def _transfer_seconds(sizes: Floats, seconds_per_byte: Floats) -> Floats:
    """Return (K, W) seconds to transfer bytes over each link; 0 for no bytes, even without a link."""
    with np.errstate(invalid="ignore"):
        return np.where(sizes > 0, sizes * seconds_per_byte[:, None], 0.0)


WIDTHS = (4, 8, 16, 32)
"""Numbers of partial plans that the beam searches keep, one after the other while the budget lasts."""
COARSE, FINE = 0.02, 0.001
"""Relative first step to a longer period, and relative width at which the binary search of periods ends."""
LONG = 1.0
"""Relative step to a longer period after the budget is used up."""
SLIGHT = 1e-7
"""Relative decrease of the period that is tried after the binary search has ended."""
SHORTEST = 1e-9
"""Least period that is tried, as a share of the upper bound on latency."""


class PricedSearch:
    """Searches plans of one instance within a budget: ``plans`` has them, ``bound`` is the lower bound in seconds.

    The period of a plan with replicas is that of its round-robin schedules (`scheduled`).

    Args:
        known: plans to start with.
    """

    def __init__(self, instance: Instance, budget: Budget, *, known: Sequence[Candidate] = ()) -> None:
        self._instance = instance
        self._budget = budget
        self._machines = machines = DeviceClasses(instance)
        self._prices = prices = fair_prices(machines.seconds, machines.counts, budget.rest(0.15))
        limit = instance.machine_limit
        self._most_stages = min(limit, instance.problem.stages or limit)
        most_machines = limit if instance.problem.replicas else self._most_stages
        self._usable = _fastest(_with_own_cores(instance, machines.counts, prices), prices, most_machines)
        # The machines of a plan are together worth at most as much as the most expensive ones that it may use.
        bound = prices.bound / float(_fastest(machines.counts, prices, most_machines) @ prices.classes)
        self.plans: list[Candidate] = [*known]
        periods = (scheduled(instance, plan).flow.period_seconds for plan in known)
        self._shortest = min(periods, default=math.inf)
        self._longest = longest_latency(instance)
        if not instance.problem.replicas:  # some machine computes the slowest piece
            bound = max(bound, float(machines.seconds.min(axis=1).max()))
        self.bound = max(bound * (1 - TOLERANCE), client_bound(instance))
        self._costs = OrderCosts(instance)

    def search(self, width: int) -> None:
        """Add the plans of beam searches of this width to ``plans``, if they fit."""
        beam, plan_count = StageBeam(self._costs, self._machines, self._prices, width), len(self.plans)
        self._bisect(beam, self._usable)
        if len(self.plans) == plan_count and (self._usable != self._machines.counts).any():
            self._bisect(beam, self._machines.counts)  # some stages must be on slow machines, or share cores
        if width == WIDTHS[0] and self._instance.problem.replicas:
            self._search_pairs()

    def _search_pairs(self) -> None:
        """Pair machines with equal links and similar `Prices`; add the plans whose stages run on these pairs.

        A machine that is left over is a group by itself.
        """
        machines = self._machines
        by_place: dict[int, list[int]] = {}
        for index in np.argsort(-self._prices.classes, kind="stable"):
            of_class = (machine for (machine,) in machines.members[index][: self._usable[index]])
            by_place.setdefault(int(machines.link_group[index]), []).extend(of_class)
        pairs = DeviceClasses(
            self._instance,
            [tuple(sorted(chosen[at : at + 2])) for chosen in by_place.values() for at in range(0, len(chosen), 2)],
        )
        if np.isfinite(pairs.seconds).any(axis=1).all():
            pair_prices = fair_prices(pairs.seconds, pairs.counts, self._budget.rest(0.15))
            self._bisect(StageBeam(self._costs, pairs, pair_prices, WIDTHS[0]), pairs.counts)

    def _bisect(self, beam: StageBeam, usable: Counts) -> None:
        """Bisect the periods between the lower bound and the shortest known one; try longer ones while none is known.

        At the end, try slightly less than the best period, as long as that succeeds. While no plan is known, continue
        in long steps after the budget is used up: one machine alone may be hundreds of times slower.
        """
        low, high, step = max(self.bound, self._longest * SHORTEST), self._shortest, COARSE
        while low < self._longest and high > self.bound and (not self.plans or not self._budget.is_used_up):
            if self._budget.is_used_up:
                step = max(step, LONG)
            is_near = high <= low * (1 + FINE)
            period = high * (1 - SLIGHT) if is_near else min(low * (1 + step), math.sqrt(low * high))
            stages = beam.stages(period, self._most_stages, usable, self._budget if self.plans else Budget())
            plan_period = None if stages is None else self._keep(stages)
            if is_near and (plan_period is None or plan_period > period):
                return
            if plan_period is None:
                low, step = period, 2 * step
            else:
                high, step = min(period, plan_period), math.inf

    def _keep(self, stages: Sequence[Placement]) -> float | None:
        """Evaluate a plan and keep it if it fits. Return its period as it runs, in seconds; None if it does not fit."""
        instance = self._instance
        stage_count = instance.problem.stages
        self._budget.spend(EVALUATION_WORK * len(stages))
        plan = tried(instance, stages if stage_count is None else _with_count(instance, stages, stage_count))
        if plan is None:
            return None
        self.plans.append(plan)
        period = scheduled(instance, plan).flow.period_seconds
        self._shortest = min(self._shortest, period)
        return period


def _fastest(counts: Counts, prices: Prices, most: int) -> Counts:
    """Return how many machines of each class to use: those of highest price, at most ``most`` in total."""
    usable = np.zeros_like(counts)
    for index in np.argsort(-prices.classes, kind="stable"):
        usable[index] = min(counts[index], most)
        most -= int(usable[index])
    return usable


def _with_own_cores(instance: Instance, counts: Counts, prices: Prices) -> Counts:
    """Return how many machines of each class to use so that each has cores of its own, the most expensive first."""
    counts = counts.copy()
    for sharing, cores in instance.core_sets:
        free = cores
        for index in np.argsort(-prices.classes, kind="stable"):
            machine = instance.classes[index][0]
            wanted = instance.problem.machines[machine].cores
            if machine in sharing and wanted:
                counts[index] = min(counts[index], max(free // wanted, int(free == cores)))
                free = max(0, free - int(counts[index]) * wanted)
    return counts


def _with_count(instance: Instance, stages: Sequence[Placement], count: int) -> Sequence[Placement]:
    """Cut the longest stages in two until there are ``count`` stages.

    Returns fewer stages if no stage can be cut; the caller checks the plan.
    """
    while len(stages) < count:
        seconds = [float(instance.times[np.ix_(stage.pieces, stage.machines)].sum()) for stage in stages]
        longest_first = sorted(range(len(stages)), key=lambda number: -seconds[number])
        cut = next(filter(None, (_with_halves(instance, stages, number) for number in longest_first)), None)
        if cut is None:
            break
        stages = cut
    return stages


def _with_halves(instance: Instance, stages: Sequence[Placement], number: int) -> list[Placement] | None:
    """Cut a stage in two; the second half is for an idle machine, or for half of the replicas."""
    pieces, machines = stages[number].pieces, stages[number].machines
    half, size = len(pieces) // 2, (len(machines) + 1) // 2
    busy = {machine for stage in stages for machine in stage.machines}
    able = np.isfinite(instance.seconds[list(pieces[half:])]).all(axis=0)
    idle = next((machine for machine in np.flatnonzero(able).tolist() if machine not in busy), None)
    staying, moved = (machines[:size], machines[size:]) if idle is None else (machines, (idle,))
    if not half or not moved:
        return None
    return [*stages[:number], Placement(staying, pieces[:half]), Placement(moved, pieces[half:]), *stages[number + 1 :]]
