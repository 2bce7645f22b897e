"""The least period on more machines than tables can list: stages along orders of the pieces, under halved periods.

What anyone would do by hand is among what is tried: all of the network dealt out to all machines, the fastest machines
only, and machines of one place as one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tvm_split.errors import PlanError
from tvm_split.planner.search.candidate import Candidate, Deliveries, candidate, fits
from tvm_split.planner.search.crowded_cores import crowded_cores, pooled, ways_to_count
from tvm_split.planner.search.ideals import predecessors, topological_orders
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.search.link_bound import client_bound
from tvm_split.planner.search.machine_classes import machine_classes
from tvm_split.planner.search.milp import longest_latency
from tvm_split.planner.search.order_costs import OrderCosts, Unit, Units, units_of
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.prices import Prices, fair_prices
from tvm_split.planner.search.simple_plans import whole_sets
from tvm_split.planner.search.stage_beam import MOST_NEIGHBOURHOODS, StageBeam, neighbourhoods
from tvm_split.planner.search.stretch_bound import stretch_bound
from tvm_split.planner.search.subsets import among_all, least_left_out, restricted

FIRST_WIDTH, LAST_WIDTH = 4, 32
"""Partial plans that are kept side by side: at first, and where time is left."""
COARSE, FINE = 0.02, 0.001
"""Share of a period to which it is halved upon: for plans of fewer machines, and for the plan."""
LONG = 1.0
"""Share of a period by which the next one is longer where there is no time left."""
SLIGHT = 1e-7
"""Share of a period by which the next one is tried, once it was halved upon."""
NEAR_ENOUGH = 0.005
"""A plan so near to the bound is not searched any longer for."""
VALUES_TRIED = 3
"""Periods between the bound and the best plan, for which the values of pieces are looked for."""
SHORTEST = 1e-9
"""Share of the time that everything takes in turn, below which no period is tried."""
MOST_LEFT_OUT = 64
"""Sets of machines, each without some, that are searched by themselves."""

Counts = npt.NDArray[np.intp]


class ManyMachines:
    """One instance, until a deadline (monotonic); `search` finds plans and raises ``bound``, in seconds.

    Plans are compared as they are delivered, with the shares that turns give their replicas.

    Args:
        leaves_out: whether it also tries without some machines.
        known: plans to begin with.
    """

    def __init__(
        self,
        instance: Instance,
        deadline: float,
        *,
        leaves_out: bool = True,
        known: Sequence[Candidate] = (),
        deliveries: Deliveries | None = None,
    ) -> None:
        self._instance, self._leaves_out = instance, leaves_out
        self._deliveries = deliveries or Deliveries(instance)
        self._start, self._deadline = time.monotonic(), deadline
        self._classes = machine_classes(instance)
        self._singles = units_of(instance, self._classes, [(each,) for each in range(len(instance.machines))])
        self._counts = self._singles.counts.astype(np.float64)
        self._prices = fair_prices(self._singles.seconds, self._counts, self._until(0.1))
        # No plan's machines are worth more together than the dearest that may be used.
        worth = float(_fastest(self._singles.counts, self._prices, self._most_machines) @ self._prices.kinds)
        self.bound = self._prices.bound / max(worth / float(self._counts @ self._prices.kinds), 1e-12) * (1 - 1e-9)
        self._crowded = crowded_cores(instance)
        if self._crowded:
            cores = fair_prices(*pooled(self._singles, self._counts, self._crowded), self._until(0.2))
            self.bound = max(self.bound, cores.bound * (1 - 1e-9))
        self.bound = max(self.bound, client_bound(instance) * (1 - 1e-9))
        self.found: list[Candidate] = [*known]
        periods = (self._deliveries.of(each).flow.period_seconds for each in known)
        self._shortest = min(periods, default=math.inf)
        self._longest = longest_latency(instance)

    def search(self) -> None:
        """Fills ``found`` with plans that hold, of all kinds, and raises ``bound``."""
        instance = self._instance
        order, *others = _orders(instance)
        first = OrderCosts(instance, order)
        if instance.problem.replicas:
            self._deal_out()
        else:
            slowest = self._singles.seconds.min(axis=1).max()
            self.bound = max(self.bound, float(slowest) * (1 - 1e-9))
        self._place(first, self._singles, self._prices, FIRST_WIDTH)
        if instance.problem.replicas:
            self._place_sets(first)
        if any(len(tensor.destinations) > 1 for tensor in instance.tensors):
            together = OrderCosts(instance, order, together=True)
            self._place(together, self._singles, self._prices, FIRST_WIDTH)
        for each in others:
            if time.monotonic() > self._until(0.4):
                break
            self._place(OrderCosts(instance, each), self._singles, self._prices, FIRST_WIDTH)
        self._place_on_fewer(first)
        values = self._values(order)
        width = FIRST_WIDTH
        while not self._is_near() and width <= LAST_WIDTH and time.monotonic() < self._deadline:
            for prices in filter(None, (values, self._prices if width > FIRST_WIDTH else None)):
                self._place(first, self._singles, prices, width)
            width *= 2
        if self._leaves_out:
            self._leave_out()

    def surpasses(self, machines: Collection[int], period: float) -> bool:
        """Whether no plan on these machines alone, of at least two, can have a shorter period."""
        counts = np.array([sum(unit[0] in machines for unit in units) for units in self._singles.members])
        return self._prices.bound >= period * float(counts @ self._prices.kinds) * (1 - 1e-9)

    def _leave_out(self) -> None:
        """The same search without some machines, those that are worth least first, as long as that can be better.

        Among unlike machines a search by rules of thumb may be luckier with fewer. By the prices, what is left has a
        bound of its own: at the end no machines of these can be better by this search than what is found, whichever.
        """
        worth, counts = self._prices.kinds, self._singles.counts
        for left_out in itertools.islice(least_left_out(counts.tolist(), worth), MOST_LEFT_OUT):
            kept = counts - np.array(left_out, dtype=np.intp)
            members = tuple(_members(self._singles, kept))
            if self._is_near() or time.monotonic() > self._until(0.8) or self.surpasses(members, self._least()):
                return
            fewer = restricted(self._instance, members)
            if np.isinf(fewer.seconds).all(axis=1).any():
                continue
            search = ManyMachines(fewer, self._until(0.8), leaves_out=False)
            search.search()
            for plan in search.found:
                self._keep(among_all(members, plan.stages))

    def _until(self, share: float) -> float:
        return self._start + share * (self._deadline - self._start)

    def _least(self) -> float:
        return self._shortest

    def _is_near(self) -> bool:
        return self._least() <= self.bound * (1 + NEAR_ENOUGH)

    def _values(self, order: Sequence[int]) -> Prices | None:
        """Prices by the stretches that machines can take; they prove a bound where all stages are such stretches."""
        instance, low, high = self._instance, self.bound, self._least()
        proves = not instance.problem.replicas and _is_only_order(instance, order)
        best: Prices | None = None
        for _ in range(VALUES_TRIED):
            if math.isinf(high) or low * high <= 0 or high <= low * (1 + NEAR_ENOUGH):
                break
            tried = math.sqrt(low * high)
            left = (self._deadline - time.monotonic()) / 4
            values = stretch_bound(self._singles.seconds[list(order)], self._counts, tried, left)
            if values is None:
                break
            if values.bound < tried * (1 - FINE):
                high = tried
            if best is None or values.bound > best.bound:
                pieces = np.empty_like(values.pieces)
                pieces[list(order)] = values.pieces
                best = replace(values, pieces=pieces)
            low = max(low, values.bound)
        if best is not None and proves:
            self.bound = max(self.bound, best.bound * (1 - 1e-9))
        return best

    def _place(self, costs: OrderCosts, units: Units, prices: Prices, width: int) -> None:
        """Halve upon the period of plans on all units, or on the fastest of them if not all may be used."""
        size = len(units.members[0][0])
        for counted, counts in ways_to_count(units, self._crowded, prices.kinds):
            beam = StageBeam(costs, counted, prices, width)
            left, known = _fastest(counts, prices, self._most_machines // size), len(self.found)
            self._halve(beam, left, FINE, self.bound, self._least())
            is_none = len(self.found) == known
            if is_none and self._most_machines < len(self._instance.machines):  # some must be on slow machines
                self._halve(beam, counts, FINE, self.bound, self._least())

    def _place_on_fewer(self, costs: OrderCosts) -> None:
        """Plans of the fastest half, quarter, … of machines: they answer sooner, and use fewer that hardly help."""
        beam = StageBeam(costs, self._singles, self._prices, FIRST_WIDTH)
        rates, count = self._prices.kinds, self._most_machines // 2
        counts = self._with_own_cores()
        while count > 1 and time.monotonic() < self._until(0.6):
            left = _fastest(counts, self._prices, count)
            share = float(left @ rates) / float(self._counts @ rates)
            self._halve(beam, left, COARSE, self.bound / share, math.inf)
            count //= 2

    def _with_own_cores(self) -> Counts:
        """As many machines of each kind as find cores of their own."""
        _, counts = next(ways_to_count(self._singles, self._crowded, self._prices.kinds))
        return counts

    @property
    def _most_stages(self) -> int:
        most = self._instance.machine_limit
        return most if self._instance.problem.stages is None else min(most, self._instance.problem.stages)

    @property
    def _most_machines(self) -> int:
        return self._instance.machine_limit if self._instance.problem.replicas else self._most_stages

    def _halve(self, beam: StageBeam, left: Counts, share: float, low: float, high: float) -> None:
        """Between two periods, until they are as near as that share; upwards first, if nothing is known above.

        In the end slightly below the best, as often as that succeeds. Without any plan yet it goes on when the time is
        over, in long steps: one machine alone may be hundreds of times slower.
        """
        low, step = max(low, self._longest * SHORTEST), COARSE
        while low < self._longest and high > self.bound and (not self.found or time.monotonic() < self._deadline):
            if time.monotonic() > self._deadline:
                step = max(step, LONG)
            is_near = high <= low * (1 + share)
            if is_near and share > FINE:
                return
            period = high * (1 - SLIGHT) if is_near else min(low * (1 + step), math.sqrt(low * high))
            stages = beam.stages(period, self._most_stages, left, self._deadline if self.found else math.inf)
            reached = None if stages is None else self._keep(stages)
            if is_near and (reached is None or reached > period):
                return
            if reached is None:
                low, step = period, 2 * step
            else:
                high, step = min(period, reached), math.inf

    def _keep(self, stages: Sequence[Placed]) -> float | None:
        """The period of a plan as it is delivered, which is kept if it holds; None if it does not."""
        instance = self._instance
        wanted = instance.problem.stages
        try:
            plan = candidate(instance, stages if wanted is None else _with_count(instance, stages, wanted))
        except PlanError:  # a link is missing between stages that are no neighbours
            return None
        if not fits(instance, plan):
            return None
        self.found.append(plan)
        period = self._deliveries.of(plan).flow.period_seconds
        self._shortest = min(self._shortest, period)
        return period

    def _deal_out(self) -> None:
        """All on all that can hold it."""
        ways = (self._with_own_cores(), self._singles.counts)
        members = dict.fromkeys(tuple(_members(self._singles, counts)) for counts in ways)
        for each in dict.fromkeys(chosen for able in members for chosen in whole_sets(self._instance, able)):
            self._keep([Placed(each, tuple(range(len(self._instance.pieces))))])

    def _place_sets(self, costs: OrderCosts) -> None:
        """Pipelines whose stages have replicas: of ever smaller units."""
        for sets in _groupings(self._instance, self._singles, self._prices, self._with_own_cores()):
            if self._is_near() or time.monotonic() > self._until(0.5):
                return
            units = units_of(self._instance, self._classes, sets)
            if np.isinf(units.seconds).all(axis=1).any():  # a piece that only single machines can run
                continue
            prices = fair_prices(units.seconds, units.counts.astype(np.float64), self._until(0.5))
            self._place(costs, units, prices, FIRST_WIDTH)


def _orders(instance: Instance) -> list[list[int]]:
    """Different topological orders, the one of the problem first."""
    return list({tuple(each): each for each in topological_orders(instance)}.values())


def _is_only_order(instance: Instance, order: Sequence[int]) -> bool:
    """Whether each piece needs the one before, so that stages without circles are stretches of this order."""
    before = predecessors(instance)
    return all(one in before[other] for one, other in itertools.pairwise(order))


def _fastest(counts: Counts, prices: Prices, most: int) -> Counts:
    """Of so many units of each kind those whose time is worth most: ``most`` together."""
    left = np.zeros_like(counts)
    for kind in np.argsort(-prices.kinds, kind="stable"):
        left[kind] = min(counts[kind], most)
        most -= int(left[kind])
    return left


def _members(singles: Units, counts: Counts) -> list[int]:
    return sorted(
        unit[0] for units, count in zip(singles.members, counts.tolist(), strict=True) for unit in units[:count]
    )


def _groupings(instance: Instance, singles: Units, prices: Prices, counts: Counts) -> Iterator[list[Unit]]:
    """Machines as units of several: all of one neighbourhood, then runs of 2, 4, … of about one speed in each.

    So many of each kind are used at most.
    """
    group_of, links = neighbourhoods(singles.seconds_per_byte[:-1, :-1], singles.counts)
    together = len(links) <= MOST_NEIGHBOURHOODS
    places: dict[int, list[int]] = {}
    left = _fastest(counts, prices, instance.machine_limit)
    for kind in np.argsort(-prices.kinds, kind="stable").tolist():
        members = [unit[0] for unit in singles.members[kind][: left[kind]]]
        places.setdefault(int(group_of[kind]) if together else 0, []).extend(members)
    largest = max(map(len, places.values()))
    for size in (largest, *(2**power for power in range(1, largest.bit_length()) if 2**power < largest)):
        yield [tuple(each[start : start + size]) for each in places.values() for start in range(0, len(each), size)]


def _with_count(instance: Instance, stages: Sequence[Placed], wanted: int) -> list[Placed]:
    """As many stages as wanted, if there are fewer: the longest ones are cut in two, with an idle machine or a replica.

    The rest is left to whoever measures the plan.
    """
    found = list(stages)
    idle = set(range(len(instance.machines))) - {machine for stage in stages for machine in stage.machines}
    used = len(instance.machines) - len(idle)
    while len(found) < wanted:
        seconds = [_mean_seconds(instance, stage) for stage in found]
        for number in sorted(range(len(found)), key=lambda each: -seconds[each]):
            stage = found[number]
            if len(stage.pieces) == 1:
                continue
            kept, others = stage.machines, stage.machines
            pieces, held = stage.pieces[: len(stage.pieces) // 2], stage.pieces[len(stage.pieces) // 2 :]
            free = [machine for machine in idle if np.isfinite(instance.seconds[list(held), machine]).all()]
            if free and used < instance.machine_limit:
                others = (min(free, key=lambda machine: float(instance.seconds[list(held), machine].sum())),)
                idle -= {*others}
                used += 1
            elif len(stage.machines) > 1:
                half = len(stage.machines) // 2
                kept, others = stage.machines[:half], stage.machines[half:]
            else:
                continue
            found[number : number + 1] = [Placed(kept, pieces), Placed(others, held)]
            break
        else:
            return found
    return found


def _mean_seconds(instance: Instance, stage: Placed) -> float:
    return float(instance.times[np.ix_(stage.pieces, stage.machines)].sum(axis=0).mean()) / len(stage.machines)
