"""Candidate plans with their evaluation: the schedules of their replicas, and how candidates are compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from rpc_runtime.program.round_robin import DIVISIBLE, LONGEST, LONGEST_CYCLE, LONGEST_PER_REPLICA, integer_weights
from tvm_split.errors import PlanError
from tvm_split.placement.evaluate import Flow, memory_shortage
from tvm_split.placement.problem import TOLERANCE, Stage, objective_seconds
from tvm_split.placement.search.instance import Instance
from tvm_split.placement.step_graph import NumberedTransfer, topological_order

LENGTH_PER_REPLICA = 16
"""Longest schedule, in micro-batches per replica. Many unequal replicas lose half of one on average: 3 % of time."""


def with_schedule_shares(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages with the shares of round-robin schedules; replicas that they never reach are left out."""
    have_schedules = [len(stage.machines) > 1 and stage.sharding is None for stage in stages]
    shares = [stage.shares for stage, has_schedule in zip(stages, have_schedules, strict=True) if has_schedule]
    counts = iter(schedule_counts(shares))
    return tuple(
        _with_counts(stage, next(counts)) if has_schedule else stage
        for stage, has_schedule in zip(stages, have_schedules, strict=True)
    )


def _with_counts(stage: Stage, counts: Sequence[int]) -> Stage:
    places = [place for place, count in enumerate(counts) if count]
    shares = tuple(counts[place] / sum(counts) for place in places)
    return replace(stage, machines=tuple(stage.machines[place] for place in places), shares=shares)


def schedule_counts(stages: Sequence[Sequence[float]], periods: Sequence[float] | None = None) -> list[tuple[int, ...]]:
    """Return how often (0 or more) each stage's schedule reaches each replica, so that the largest excess is least.

    These are the weights of a weighted round robin. The excess of a replica is the ratio of its part of the schedule to
    its share. If the shares of all stages are whole counts already, they stay, even if the schedules become longer.

    For a given length it is optimal to give each next place to the replica with the least excess after it (Jefferson's
    method: Balinski, Young 1982, "Fair Representation"). So an additional replica does not make this worse, and equal
    replicas get one place each. The schedule lengths of several stages have a common multiple of at most
    `LONGEST_CYCLE`, chosen to minimise the longest period of a stage; among equally good ones the shortest is taken.

    Args:
        stages: for each stage the shares of its replicas, which count in proportion.
        periods: the period of each stage if its replicas had exactly these shares; by default all are equal.
    """
    exact = [counts for counts in map(integer_weights, stages) if counts is not None]
    if len(exact) == len(stages) and math.lcm(*map(sum, exact)) <= LONGEST_CYCLE:
        return exact
    schedules = [_weighted_schedule(shares) for shares in stages]
    if len(schedules) < 2:
        return [schedule.counts(_first_least(schedule.largest_excess) + 1) for schedule in schedules]
    longest = min(max(DIVISIBLE, sum(len(schedule.largest_excess) for schedule in schedules)), LONGEST_CYCLE)
    longest_period = np.zeros(longest)
    for schedule, period in zip(schedules, periods or [1.0] * len(schedules), strict=True):
        longest_period = np.maximum(longest_period, period * schedule.least_excess(longest))
    return [schedule.counts(_first_least(longest_period) + 1) for schedule in schedules]


@dataclass(frozen=True)
class _Schedules:
    """The schedules of one stage, of every length: the one of a length consists of ``replicas[:length]``.

    ``largest_excess[length - 1]`` is the largest excess of a replica in the schedule of this length.
    """

    count: int
    replicas: npt.NDArray[np.intp]
    largest_excess: npt.NDArray[np.float64]

    def least_excess(self, longest: int) -> npt.NDArray[np.float64]:
        """Return the least excess of any schedule that repeats after 1, 2, … micro-batches, up to ``longest``."""
        least = np.full(longest, math.inf)
        for length, excess in enumerate(self.largest_excess.tolist(), 1):
            np.minimum(least[length - 1 :: length], excess, out=least[length - 1 :: length])
        return least

    def counts(self, cycle: int) -> tuple[int, ...]:
        """Return the counts of the replicas in the best schedule that repeats after ``cycle`` micro-batches."""
        lengths = [length for length in range(1, min(cycle, len(self.largest_excess)) + 1) if cycle % length == 0]
        length = lengths[_first_least(self.largest_excess[np.array(lengths) - 1])]
        return tuple(np.bincount(self.replicas[:length], minlength=self.count).tolist())


def _weighted_schedule(shares: Sequence[float]) -> _Schedules:
    """Give each place to the replica with the least excess after it; prefixes of the list are the shorter schedules."""
    parts = np.array(shares) / math.fsum(shares)
    with_share = np.flatnonzero(parts)  # replicas with a share of 0 get no place
    longest = min(max(LONGEST, LENGTH_PER_REPLICA * len(with_share)), LONGEST_CYCLE)
    most = np.floor((longest + len(with_share)) * parts[with_share]).astype(np.intp)  # their sum is at least `longest`
    replicas = np.repeat(with_share, most)
    numbers = np.arange(1, len(replicas) + 1) - np.repeat(np.cumsum(most) - most, most)
    excess = numbers / parts[replicas]
    order = np.argsort(excess, kind="stable")[:longest]
    lengths = np.arange(1, longest + 1)
    # `schedule_by_share`, which turns the shares back into a schedule, tries only these lengths.
    replica_counts = np.cumsum(numbers[order] == 1)
    is_tried = lengths <= np.maximum(LONGEST, LONGEST_PER_REPLICA * replica_counts)
    return _Schedules(len(parts), replicas[order], np.where(is_tried, excess[order] / lengths, math.inf))


def _first_least(values: npt.NDArray[np.float64]) -> int:
    return int(np.argmax(values <= values.min() * (1 + TOLERANCE)))


@dataclass(frozen=True)
class Placement:
    """A stage by numbers: the pieces in topological order, and the machines that share its micro-batches."""

    machines: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A plan: stages by numbers, in topological order, and their evaluated flow."""

    stages: tuple[Placement, ...]
    flow: Flow

    @property
    def machines(self) -> tuple[int, ...]:
        return tuple(machine for stage in self.stages for machine in stage.machines)

    @property
    def value(self) -> float:
        """The objective's value in seconds: the period or the latency."""
        return objective_seconds(self.flow.problem.objective, self.flow)

    @property
    def other_value(self) -> float:
        """The value that breaks ties, in seconds: the latency or the period."""
        is_throughput = self.flow.problem.objective == "throughput"
        return self.flow.latency_seconds if is_throughput else self.flow.period_seconds

    @property
    def rank(self) -> tuple[float, float, int]:
        """The sort key of a plan; smaller is better."""
        return self.value, self.other_value, len(self.machines)

    @property
    def is_within_limits(self) -> bool:
        """Whether the plan's period and latency keep to the problem's limits."""
        flow, problem = self.flow, self.flow.problem
        # The latency takes time to compute, so it is not read without a limit.
        return flow.period_seconds <= problem.maximum_period_seconds * (1 + TOLERANCE) and (
            math.isinf(problem.maximum_latency_seconds)
            or flow.latency_seconds <= problem.maximum_latency_seconds * (1 + TOLERANCE)
        )

    def named(self, instance: Instance) -> tuple[Stage, ...]:
        """Return the stages by names, with the shares of their replicas."""
        share = {load.machine: load.share for load in self.flow.loads}
        stages = []
        for stage in self.stages:
            machines = tuple(instance.machines[machine] for machine in stage.machines)
            pieces = tuple(instance.pieces[piece] for piece in stage.pieces)
            stages.append(Stage(machines, pieces, tuple(share[machine] for machine in machines)))
        return tuple(stages)


def candidate(
    instance: Instance, stages: Sequence[Placement], share_of: Mapping[int, float] | None = None
) -> Candidate:
    """Evaluate stages, and put them in topological order.

    Replicas get shares in proportion to their speeds, or the shares in ``share_of``, by machine.

    Raises:
        PlanError: stages wait for each other in a cycle, or a link is missing.
    """
    stage_of = {piece: number for number, stage in enumerate(stages) for piece in stage.pieces}
    stage_of[instance.client] = instance.client
    transfers = []
    for tensor in instance.tensors:
        source = stage_of[tensor.source]
        ends = {stage_of[piece] for piece in tensor.destinations}
        transfers += [(source, end, tensor.bytes) for end in ends if end != source]
    if any(source > end >= 0 for source, end, _ in transfers):
        order = topological_order(
            len(stages),
            ((source, end) for source, end, _ in transfers),
            lambda number: [instance.machines[machine] for machine in stages[number].machines],
        )
        stages = [stages[number] for number in order]
        place = {number: place for place, number in enumerate(order)} | {instance.client: instance.client}
        transfers = [(place[source], place[end], size) for source, end, size in transfers]
    numbered = [
        NumberedTransfer(source, () if end == instance.client else (end,), size) for source, end, size in transfers
    ]
    steps = [instance.step(stage.machines, stage.pieces) for stage in stages]
    if share_of:
        steps = [
            step._replace(shares=tuple(share_of[machine] for machine in step.machines)) if not step.shares else step
            for step in steps
        ]
    return Candidate(tuple(stages), Flow(instance.problem, instance.between, steps, numbered))


def scheduled(instance: Instance, plan: Candidate) -> Candidate:
    """Return the plan as it runs: each replica gets the share that its round-robin schedule gives it.

    A replica without a share is removed. The result is never better than with shares of any size. A plan without
    replicas is returned unchanged.
    """
    several = [stage.machines for stage in plan.stages if len(stage.machines) > 1]
    if not several:
        return plan
    loads = {instance.machine_number[load.machine]: load for load in plan.flow.loads}
    schedules = schedule_counts(
        [[loads[machine].share for machine in machines] for machines in several],
        [max(loads[machine].compute_seconds for machine in machines) for machines in several],
    )
    share_of = {
        machine: count / sum(counts)
        for machines, counts in zip(several, schedules, strict=True)
        for machine, count in zip(machines, counts, strict=True)
    }
    stages = [
        Placement(tuple(machine for machine in stage.machines if share_of.get(machine, 1.0)), stage.pieces)
        for stage in plan.stages
    ]
    return candidate(instance, stages, share_of)


def best_scheduled(instance: Instance, plans: Iterable[Candidate]) -> Candidate | None:
    """Return the best plan after `scheduled` that keeps to the problem's limits; None if there is none."""
    feasible: list[Candidate] = []
    least = math.inf
    for plan in sorted(plans, key=lambda plan: plan.value):
        if plan.value > least * (1 + TOLERANCE):
            break
        running = scheduled(instance, plan)
        if running.is_within_limits:
            feasible.append(running)
            least = min(least, running.value)
    return best_of(feasible)


def tried(instance: Instance, stages: Sequence[Placement]) -> Candidate | None:
    """Evaluate stages; None if a link is missing between two of them, or if they do not fit.

    Plans that fit keep to pins, memory and the numbers of stages and machines; period and latency do not matter.
    """
    try:
        plan = candidate(instance, stages)
    except PlanError:
        return None
    is_fitting = (
        instance.problem.stages in (None, len(plan.stages))
        and len(plan.machines) <= instance.machine_limit
        and all(instance.is_allowed(stage.machines, stage.pieces) for stage in plan.stages)
        and memory_shortage(instance.problem, plan.flow) == 0
    )
    return plan if is_fitting else None


def best_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the least `value`; ties: the least `other_value`, then the fewest machines."""
    remaining = list(candidates)
    for value_of in (attrgetter("value"), attrgetter("other_value")):
        least = min(map(value_of, remaining), default=math.inf)
        remaining = [plan for plan in remaining if value_of(plan) <= least * (1 + TOLERANCE)]
    return min(remaining, key=lambda plan: len(plan.machines), default=None)


def one_machine_candidates(instance: Instance) -> list[Candidate]:
    """Return one plan per machine that can hold all pieces: everything on that machine."""
    everything = tuple(range(len(instance.pieces)))
    possible = [machine for machine in range(len(instance.machines)) if np.isfinite(instance.seconds[:, machine]).all()]
    plans = (tried(instance, [Placement((machine,), everything)]) for machine in possible)
    return [plan for plan in plans if plan is not None]
