"""Replicas for which there are no turns are left out, and no others."""

import math

import pytest
from hypothesis import given, strategies as st

from tvm_split.planner.problem import Stage
from tvm_split.planner.rare_replicas import with_turns
from tvm_split.rpc_runtime.program.turns import CYCLE, turns_by_share


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6))
def test_replicas_that_are_too_rare_for_a_turn_are_left_out(speeds):
    shares = tuple(speed / math.fsum(speeds) for speed in speeds)
    stage = Stage(tuple(f"machine-{index}" for index in range(len(speeds))), ("layer_0",), shares)
    (kept,) = with_turns([stage])
    assert math.isclose(math.fsum(kept.shares), 1.0)
    assert set(range(len(kept.machines))) == set(turns_by_share(kept.shares))
    assert kept == stage or len(kept.machines) < len(stage.machines)


@pytest.mark.parametrize("count", [61, 64, 200, CYCLE])
def test_large_sets_of_equal_replicas_are_kept_whole(count):
    stage = Stage(tuple(f"machine-{index}" for index in range(count)), ("layer_0",), (1 / count,) * count)
    assert with_turns([stage]) == (stage,)
    counts = [stage.turns.count(replica) for replica in range(count)]
    assert min(counts) >= 1
    assert max(counts) <= 1.2 * len(stage.turns) / count  # what one has too much makes the stream so much slower


def test_of_more_replicas_than_turns_as_many_as_there_are_turns_stay():
    stage = Stage(tuple(f"machine-{index}" for index in range(1000)), ("layer_0",), (1 / 1000,) * 1000)
    (kept,) = with_turns([stage])
    assert sorted(kept.turns) == list(range(CYCLE))


def test_of_unlike_replicas_the_rarest_are_left_out():
    shares = (*[1 / 64] * 63, 1 / 64 - 1e-4, 1e-4)
    stage = Stage(tuple(f"machine-{index}" for index in range(65)), ("layer_0",), shares)
    (kept,) = with_turns([stage])
    assert kept.machines == stage.machines[:64]
