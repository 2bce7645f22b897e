"""Search for the least period on more machines than tables can hold: beam searches inside a binary search of periods.

Stages follow an order of the pieces. With replicas, the search also tries the whole network on all machines, and the
machines of one site as one unit. Of machines on oversubscribed cores, it uses only as many as have cores of their own.
This loses nothing if pieces are small, and needs fewer transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.errors import PlanError
from tvm_split.planner.search.bounds import Prices, client_bound, fair_prices
from tvm_split.planner.search.budget import EVALUATION_WORK, Budget
from tvm_split.planner.search.candidate import Candidate, Placement, candidate, delivered, fits
from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.mixed_integer import longest_latency
from tvm_split.planner.search.order_costs import OrderCosts, Unit, Units, units_of
from tvm_split.planner.search.stage_beam import StageBeam, neighbourhoods

WIDTH = 4
"""Number of partial plans that the beam search keeps."""
MOST_TRIES = 100
"""Most further searches with perturbed prices."""
DISTURBANCE = 0.05
"""Relative standard deviation of perturbed prices, about; it makes the search try other good plans."""
COARSE, FINE = 0.02, 0.001
"""Relative first step to a longer period, and relative width at which the binary search of periods ends."""
LONG = 1.0
"""Relative step to a longer period after the budget is used up."""
SLIGHT = 1e-7
"""Relative decrease of the period that is tried after the binary search has ended."""
NEAR_ENOUGH = 0.005
"""Relative gap to the lower bound at which the search stops."""
MOST_NEIGHBOURHOODS = 64
"""Most neighbourhoods of which each gets units of its own."""
SHORTEST = 1e-9
"""Least period that is tried, as a share of the upper bound on latency."""
Counts = npt.NDArray[np.intp]


class PricedSearch:
    """Searches plans of one instance within a budget: ``found`` has them, ``bound`` is the lower bound in seconds.

    The period of a plan with replicas is that of its round-robin schedules (`delivered`).

    Args:
        known: plans to start with.
    """

    def __init__(self, instance: Instance, budget: Budget, *, known: Sequence[Candidate] = ()) -> None:
        self._instance = instance
        self._budget = budget
        self._classes = instance.classes
        self._singles = units_of(instance, self._classes, [(index,) for index in range(len(instance.machines))])
        self._counts = self._singles.counts.astype(np.float64)
        self._prices = fair_prices(self._singles.seconds, self._counts, budget.rest(0.15))
        # The machines of a plan are together worth at most as much as the most expensive ones that it may use.
        worth = float(_fastest(self._singles.counts, self._prices, self._most_machines) @ self._prices.classes)
        self.bound = self._prices.bound / max(worth / float(self._counts @ self._prices.classes), 1e-12) * (1 - 1e-9)
        self._oversubscribed = _oversubscribed_cores(instance)
        if self._oversubscribed:
            cores = fair_prices(*_pooled(self._singles, self._counts, self._oversubscribed), budget.rest(0.15))
            self.bound = max(self.bound, cores.bound * (1 - 1e-9))
        self.bound = max(self.bound, client_bound(instance) * (1 - 1e-9))
        self.found: list[Candidate] = [*known]
        periods = (delivered(instance, plan).flow.period_seconds for plan in known)
        self._shortest = min(periods, default=math.inf)
        self._longest = longest_latency(instance)

    def search(self) -> None:
        """Add the plans that fit to ``found``, and raise ``bound``."""
        instance = self._instance
        order = range(len(instance.pieces))
        costs = OrderCosts(instance, order)
        if not instance.problem.replicas:
            slowest = self._singles.seconds.min(axis=1).max()
            self.bound = max(self.bound, float(slowest) * (1 - 1e-9))
        self._place(costs, self._singles, self._prices)
        if instance.problem.replicas:
            self._place_sets(costs)
        if any(len(tensor.destinations) > 1 for tensor in instance.tensors):
            together = OrderCosts(instance, order, together=True)
            self._place(together, self._singles, self._prices)
        generator = np.random.default_rng(0)
        for _ in range(MOST_TRIES):
            if self._is_near() or self._budget.is_used_up:
                return
            prices = _disturbed(self._prices, generator)
            self._place(costs, self._singles, prices, low=self._shortest * (1 - COARSE))

    def _is_near(self) -> bool:
        return self._shortest <= self.bound * (1 + NEAR_ENOUGH)

    def _place(self, costs: OrderCosts, units: Units, prices: Prices, low: float = 0.0) -> None:
        """Search the period of plans on all units, or on the fastest ones if not all may be used."""
        size = len(units.members[0][0])
        counts = _counts_with_own_cores(units, self._oversubscribed, prices.classes)
        beam = StageBeam(costs, units, prices, WIDTH)
        usable, plan_count = _fastest(counts, prices, self._most_machines // size), len(self.found)
        self._halve(beam, usable, low)
        is_none = len(self.found) == plan_count
        if is_none and (usable != units.counts).any():  # some must be on slow machines, or share cores
            self._halve(beam, units.counts, low)

    @property
    def _most_stages(self) -> int:
        most = self._instance.machine_limit
        return most if self._instance.problem.stages is None else min(most, self._instance.problem.stages)

    @property
    def _most_machines(self) -> int:
        return self._instance.machine_limit if self._instance.problem.replicas else self._most_stages

    def _halve(self, beam: StageBeam, usable: Counts, low: float) -> None:
        """Search periods between the lower bound and the shortest known period; upwards while no plan is known.

        At the end, try slightly less than the best period, as long as that succeeds. While no plan is known, continue
        in long steps after the budget is used up: one machine alone may be hundreds of times slower.
        """
        low, high, step = max(low, self.bound, self._longest * SHORTEST), self._shortest, COARSE
        while low < self._longest and high > self.bound and (not self.found or not self._budget.is_used_up):
            if self._budget.is_used_up:
                step = max(step, LONG)
            is_near = high <= low * (1 + FINE)
            period = high * (1 - SLIGHT) if is_near else min(low * (1 + step), math.sqrt(low * high))
            stages = beam.stages(period, self._most_stages, usable, self._budget if self.found else Budget())
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
        try:
            plan = candidate(instance, stages if stage_count is None else _with_count(instance, stages, stage_count))
        except PlanError:  # a link is missing between stages that are not adjacent
            return None
        if not fits(instance, plan):
            return None
        self.found.append(plan)
        period = delivered(instance, plan).flow.period_seconds
        self._shortest = min(self._shortest, period)
        return period

    def _place_sets(self, costs: OrderCosts) -> None:
        """Try pipelines whose stages have replicas, with smaller and smaller units."""
        counts = _counts_with_own_cores(self._singles, self._oversubscribed, self._prices.classes)
        for sets in _groupings(self._instance, self._singles, self._prices, counts):
            if self._is_near() or self._budget.until(0.5).is_used_up:
                return
            units = units_of(self._instance, self._classes, sets)
            if np.isinf(units.seconds).all(axis=1).any():  # a piece that only single machines can run
                continue
            prices = fair_prices(units.seconds, units.counts.astype(np.float64), self._budget.until(0.5))
            self._place(costs, units, prices)


def _disturbed(prices: Prices, generator: np.random.Generator) -> Prices:
    """Return prices with small random changes; they prove no bound."""
    classes, pieces = (
        values * np.exp(DISTURBANCE * generator.standard_normal(len(values)))
        for values in (prices.classes, prices.pieces)
    )
    return Prices(classes, pieces, 0.0)


def _fastest(counts: Counts, prices: Prices, most: int) -> Counts:
    """Return how many units of each kind to use: the ones of highest price, at most ``most`` in total."""
    usable = np.zeros_like(counts)
    for kind in np.argsort(-prices.classes, kind="stable"):
        usable[kind] = min(counts[kind], most)
        most -= int(usable[kind])
    return usable


def _groupings(instance: Instance, singles: Units, prices: Prices, counts: Counts) -> Iterator[list[Unit]]:
    """Yield groupings of machines into units: all of one neighbourhood, then 2, 4, … of similar speed in each.

    At most ``counts`` machines of each kind are used.
    """
    group_of, links = neighbourhoods(singles.seconds_per_byte[:-1, :-1], singles.counts)
    together = len(links) <= MOST_NEIGHBOURHOODS
    places: dict[int, list[int]] = {}
    usable = _fastest(counts, prices, instance.machine_limit)
    for kind in np.argsort(-prices.classes, kind="stable").tolist():
        members = [unit[0] for unit in singles.members[kind][: usable[kind]]]
        places.setdefault(int(group_of[kind]) if together else 0, []).extend(members)
    largest = max(map(len, places.values()))
    for size in (largest, *(2**power for power in range(1, largest.bit_length()) if 2**power < largest)):
        yield [tuple(place[start : start + size]) for place in places.values() for start in range(0, len(place), size)]


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


@dataclass(frozen=True)
class _Cores:
    """A set of ``cores`` shared by machines that want more of them; ``wanted`` is the number of cores per machine."""

    wanted: dict[int, int]
    cores: int

    @property
    def oversubscription(self) -> float:
        """Cores wanted divided by cores available: the slowdown when all machines compute at the same time."""
        return sum(self.wanted.values()) / self.cores


def _oversubscribed_cores(instance: Instance) -> tuple[_Cores, ...]:
    """Return the oversubscribed sets of cores of an instance; the client's use of cores is not counted."""
    core_counts = [machine.cores for machine in instance.problem.machines]
    sets = (
        _Cores(
            {member: core_counts[member] for member in members if member != instance.client and core_counts[member]},
            cores,
        )
        for members, cores in instance.core_sets
    )
    return tuple(core_set for core_set in sets if core_set.wanted and core_set.oversubscription > 1)


def _counts_with_own_cores(units: Units, oversubscribed: Sequence[_Cores], worth: Floats) -> Counts:
    """Return the number of units of each kind to use such that their cores suffice; all units if all cores do.

    Args:
        worth: (K,) price of a unit's time; units with the least price per core are left out first.
    """
    needed = [_needed(units, core_set) for core_set in oversubscribed]
    counts = units.counts.copy()
    total_needed = np.sum(needed, axis=0) if needed else np.zeros(len(counts))
    order = np.argsort(-worth / np.maximum(total_needed, 1.0), kind="stable")
    for core_set, cores in zip(oversubscribed, needed, strict=True):
        free_cores = float(core_set.cores)
        for kind in order[cores[order] > 0]:
            whole = (
                int(free_cores // cores[kind])
                if free_cores < core_set.cores
                else max(1, int(free_cores // cores[kind]))
            )
            counts[kind] = min(counts[kind], whole)
            free_cores = max(0.0, free_cores - counts[kind] * cores[kind])
    return counts


def _pooled(units: Units, counts: Floats, oversubscribed: Sequence[_Cores]) -> tuple[Floats, Floats]:
    """Return seconds (n, K') and counts (K',) in which each oversubscribed core set replaces the machines on it.

    In every plan, the core time of these machines is at most cores × period. So a lower bound on the period for these
    kinds also holds for the machines. If a machine is in several sets, the most oversubscribed set counts.
    """
    seconds, remaining = units.seconds.copy(), counts.astype(np.float64)
    columns, cores = [], []
    for core_set in sorted(oversubscribed, key=lambda core_set: -core_set.oversubscription):
        needed = np.where(remaining > 0, _needed(units, core_set), 0.0)
        pooled = needed > 0
        if pooled.any() and float(needed @ remaining) > core_set.cores:
            columns.append((seconds[:, pooled] * needed[pooled]).min(axis=1))
            cores.append(float(core_set.cores))
            remaining[pooled] = 0.0
    unpooled = remaining > 0
    return np.column_stack([seconds[:, unpooled], *columns]), np.concatenate([remaining[unpooled], cores])


def _needed(units: Units, cores: _Cores) -> Floats:
    """Return (K,) the number of these cores that a unit of each kind keeps busy."""
    return np.array(
        [sum(cores.wanted.get(machine, 0) for machine in kind_units[0]) for kind_units in units.members], dtype=float
    )
