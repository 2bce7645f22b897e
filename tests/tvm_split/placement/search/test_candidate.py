"""Round-robin schedules: only replicas without a micro-batch are left out, and predictions match the schedules."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import example, given, settings, strategies as st

from rpc_runtime.program.round_robin import DIVISIBLE, schedule_by_share
from tests.helpers.placement.oracle import best, chain_plans, judge
from tests.helpers.placement.problems import random_problem
from tests.helpers.placement.steps import evaluate_stages
from tvm_split.errors import PlanError
from tvm_split.placement.problem import Piece, Problem, ProblemMachine, Stage
from tvm_split.placement.search import Budget, solve
from tvm_split.placement.search.candidate import schedule_counts, with_schedule_shares

SPEEDS = st.lists(st.floats(0.1, 1.0), min_size=2, max_size=8)


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6))
def test_replicas_that_are_too_rare_for_the_schedule_are_left_out(speeds):
    shares = tuple(speed / math.fsum(speeds) for speed in speeds)
    stage = Stage(tuple(f"machine-{index}" for index in range(len(speeds))), ("layer_0",), shares)
    (scheduled,) = with_schedule_shares([stage])
    assert math.isclose(math.fsum(scheduled.shares), 1.0)
    assert set(range(len(scheduled.machines))) == set(schedule_by_share(scheduled.shares))
    assert all(machine in stage.machines for machine in scheduled.machines)
    counts = [scheduled.replica_schedule.count(replica) for replica in range(len(scheduled.machines))]
    assert scheduled.shares == tuple(count / len(scheduled.replica_schedule) for count in counts)
    assert with_schedule_shares([scheduled]) == (scheduled,)


@given(st.lists(st.floats(0.3, 6.0), min_size=2, max_size=30), st.lists(st.floats(0.3, 6.0), min_size=1, max_size=8))
@example([1.0] * 30, [5.736, 4.709, 0.316, 5.792, 2.198])
@example([1.0] * 15, [5.645, 1.488, 5.889, 4.151, 4.936])
def test_more_replicas_are_never_slower(seconds, more):
    assert period_of([*seconds, *more]) <= period_of(seconds) * (1 + 1e-8)


@given(SPEEDS)
def test_no_schedule_of_such_a_length_is_faster(speeds):
    """For each length, giving each position to the replica with the least excess is optimal."""
    whole = math.fsum(speeds)
    (counts,) = schedule_counts([[speed / whole for speed in speeds]])
    excess = largest_excess(counts, speeds)
    for length in range(1, 16 * len(speeds) + 1):
        fair = [0] * len(speeds)
        for _ in range(length):
            least = min(range(len(speeds)), key=lambda place: (fair[place] + 1) / speeds[place])
            fair[least] += 1
        assert excess <= largest_excess(fair, speeds) * (1 + 1e-8)


def largest_excess(counts, speeds):
    """The largest ratio of a replica's weight to its share of all weights."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True)) * math.fsum(speeds) / sum(counts)


@given(st.lists(SPEEDS, min_size=2, max_size=6))
def test_schedules_of_several_stages_repeat_together_soon(stages):
    names = itertools.count()
    given_stages = [
        Stage(
            tuple(f"machine-{next(names)}" for _ in speeds), ("layer",), tuple(speed / sum(speeds) for speed in speeds)
        )
        for speeds in stages
    ]
    scheduled = with_schedule_shares(given_stages)
    assert math.lcm(*(len(stage.replica_schedule) for stage in scheduled)) <= DIVISIBLE
    assert with_schedule_shares(scheduled) == scheduled
    for before, after in zip(given_stages, scheduled, strict=True):
        share_of = dict(zip(before.machines, before.shares, strict=True))
        assert max(part / share_of[name] for name, part in zip(after.machines, after.shares, strict=True)) < 1.1


def test_the_slowest_stage_has_the_best_schedule():
    """Schedules of length 31 and 29 would repeat together after 899."""
    for periods, exact in (([1.0, 0.5], 0), ([0.5, 1.0], 1)):
        shares = [[1 / 31] * 31, [1 / 29] * 29]
        counts = schedule_counts(shares, periods)
        assert math.lcm(*map(sum, counts)) <= DIVISIBLE + 16 * 60
        assert counts[exact] == (1,) * len(shares[exact])


def period_of(seconds):
    """The period of a stage on machines that take ``seconds`` for it, with shares by their speeds."""
    speeds = [1 / duration for duration in seconds]
    names = {f"machine-{index}": duration for index, duration in enumerate(seconds)}
    (scheduled,) = with_schedule_shares(
        [Stage(tuple(names), ("layer_0",), tuple(speed / math.fsum(speeds) for speed in speeds))]
    )
    return max(share * names[name] for name, share in zip(scheduled.machines, scheduled.shares, strict=True))


def one_piece(slowness):
    names = [f"machine-{index}" for index in range(len(slowness))]
    return Problem(
        objective="throughput",
        machines=tuple(map(ProblemMachine, names)),
        links=(),
        pieces=(Piece("whole", {name: 0.01 * factor for name, factor in zip(names, slowness, strict=True)}),),
        edges=(),
        replicas=True,
    )


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(2, 3), st.booleans())
def test_the_value_lies_between_the_best_plans_with_any_shares_and_without_replicas(seed, pieces, machines, chain):
    problem = random_problem(seed, pieces=pieces, machines=machines, chain=chain, replicas=True, objective="throughput")
    problem = dataclasses.replace(problem, maximum_latency_seconds=math.inf, maximum_period_seconds=math.inf)
    expected = best(problem, chain_plans(problem)) if chain else None
    try:
        solution = solve(problem, budget=Budget(work=1e8))
    except PlanError:
        assert expected is None
        return
    value = solution.evaluation.period_seconds
    assert evaluate_stages(problem, solution.stages) == solution.evaluation
    assert with_schedule_shares(solution.stages) == solution.stages
    assert solution.lower_bound_seconds <= value * (1 + 1e-9)
    if expected is not None:
        assert solution.lower_bound_seconds == pytest.approx(expected[0], rel=2e-9, abs=1e-15)
        without = best(
            dataclasses.replace(problem, replicas=False), chain_plans(dataclasses.replace(problem, replicas=False))
        )
        assert without is None or value <= without[0] * (1 + 1e-9)


def test_a_longest_period_is_kept_by_the_schedule():
    """With shares of any size, the plan with the least latency only just satisfies the limit."""
    slow = one_piece([1.0, 1.37, 2.11, 3.05])
    least = 0.01 / (1 / 1.0 + 1 / 1.37)
    limited = dataclasses.replace(slow, objective="latency", maximum_period_seconds=least)
    solution = solve(limited)
    assert solution.evaluation.period_seconds <= least
    (stage,) = solution.stages
    judged = judge(limited, [(stage.machines, list(stage.layers))])
    assert judged is not None


def test_a_longest_period_that_no_schedule_keeps():
    problem = one_piece([1.0, 1.37])
    best_of_all = 0.01 / (1 / 1.0 + 1 / 1.37)
    with pytest.raises(PlanError, match=r"replicas give a period of .*, the limit is"):
        solve(dataclasses.replace(problem, maximum_period_seconds=best_of_all))
