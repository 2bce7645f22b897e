"""Replicas for which there are no turns are left out, and no others; what is promised is what turns deliver."""

import math

import pytest
from hypothesis import example, given, strategies as st

from tvm_split.planner.problem import Piece, Problem, ProblemMachine, Stage
from tvm_split.planner.rare_replicas import as_delivered, with_turns
from tvm_split.planner.search import solve
from tvm_split.rpc_runtime.program.turns import CLOSE, CYCLE, turns_by_share


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6))
def test_replicas_that_are_too_rare_for_a_turn_are_left_out(speeds):
    shares = tuple(speed / math.fsum(speeds) for speed in speeds)
    stage = Stage(tuple(f"machine-{index}" for index in range(len(speeds))), ("layer_0",), shares)
    (kept,) = with_turns([stage])
    assert math.isclose(math.fsum(kept.shares), 1.0)
    assert set(range(len(kept.machines))) == set(turns_by_share(kept.shares))
    assert all(each in stage.machines for each in kept.machines)
    counts = [kept.turns.count(replica) for replica in range(len(kept.machines))]
    assert kept.shares == tuple(count / len(kept.turns) for count in counts)
    assert with_turns([kept]) == (kept,)


@pytest.mark.parametrize("count", [11, 61, 64, 200, 334, CYCLE])
def test_large_sets_of_equal_replicas_are_nearly_as_fast_as_even_shares(count):
    kept = equal_replicas(count)
    counts = [kept.turns.count(replica) for replica in range(len(kept.machines))]
    assert min(counts) >= 1
    assert max(counts) <= 1.2 * len(kept.turns) / count  # what one has too much makes the stream so much slower
    assert kept.shares == tuple(each / len(kept.turns) for each in counts)


def test_of_more_replicas_than_turns_as_many_as_there_are_turns_stay():
    kept = equal_replicas(1000)
    assert sorted(kept.turns) == list(range(CYCLE))


def test_of_unlike_replicas_the_rarest_are_left_out():
    shares = (*[1 / 64] * 63, 1 / 64 - 1e-4, 1e-4)
    stage = Stage(tuple(f"machine-{index}" for index in range(65)), ("layer_0",), shares)
    (kept,) = with_turns([stage])
    assert stage.machines[64] not in kept.machines


@given(st.lists(st.floats(0.3, 6.0), min_size=2, max_size=30), st.lists(st.floats(0.3, 6.0), min_size=1, max_size=8))
@example([1.0] * 30, [5.736, 4.709, 0.316, 5.792, 2.198])
@example([1.0] * 15, [5.645, 1.488, 5.889, 4.151, 4.936])
def test_more_replicas_are_never_slower(seconds, more):
    """But for the shorter turns that are preferred to ones that are as good but for a hundredth."""
    assert period_of([*seconds, *more]) <= period_of(seconds) * (1 + CLOSE)


def test_replicas_take_turns_as_often_as_their_speeds_allow():
    """With two turns for each of the fast ones and one for some of the others: 840 of 1,000 unlike machines' parts."""
    assert period_of([1.0] * 334 + [2.0] * 333 + [4.0] * 333) <= 2.0 / CYCLE * 1.001


def period_of(seconds):
    """Of a stage that the machines take so many seconds for, with shares by their speeds."""
    speeds = [1 / each for each in seconds]
    names = {f"machine-{index}": each for index, each in enumerate(seconds)}
    (kept,) = with_turns([Stage(tuple(names), ("layer_0",), tuple(each / math.fsum(speeds) for each in speeds))])
    return max(share * names[name] for name, share in zip(kept.machines, kept.shares, strict=True))


def equal_replicas(count):
    (kept,) = with_turns([Stage(tuple(f"machine-{i}" for i in range(count)), ("layer_0",), (1 / count,) * count)])
    return kept


@pytest.mark.parametrize("slowness", [[1.0, 90.0], [1.0, 2.7, 5.3], [1.0 + place / 7 for place in range(20)]])
def test_what_is_promised_is_what_turns_deliver(slowness):
    """Of a stream, every replica has computed its turns after a whole number of them."""
    names = [f"machine-{index}" for index in range(len(slowness))]
    problem = Problem(
        objective="throughput",
        machines=tuple(map(ProblemMachine, names)),
        links=(),
        pieces=(Piece("whole", {name: 0.01 * each for name, each in zip(names, slowness, strict=True)}),),
        edges=(),
        replicas=True,
    )
    ideal = solve(problem, time_limit_seconds=1.0)
    promised = as_delivered(problem, ideal)
    (stage,) = promised.stages
    seconds = problem.pieces[0].seconds
    slowest = max(stage.turns.count(place) * seconds[name] for place, name in enumerate(stage.machines))
    assert promised.evaluation.period_seconds == pytest.approx(slowest / len(stage.turns), rel=1e-12)
    assert promised.evaluation.period_seconds > ideal.evaluation.period_seconds * 1.0001
    assert promised.gap > 0
    assert promised.method.endswith("turns give them")
    assert tuple(load.share for load in promised.evaluation.loads) == stage.shares
