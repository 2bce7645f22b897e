"""Replicas for which there are no turns are left out, and no others."""

import math

from hypothesis import given, strategies as st

from tvm_split.planner.problem import Stage
from tvm_split.planner.rare_replicas import with_turns
from tvm_split.rpc_runtime.program.turns import turns_by_share


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6))
def test_replicas_that_are_too_rare_for_a_turn_are_left_out(speeds):
    shares = tuple(speed / math.fsum(speeds) for speed in speeds)
    stage = Stage(tuple(f"machine-{index}" for index in range(len(speeds))), ("layer_0",), shares)
    (kept,) = with_turns([stage])
    assert math.isclose(math.fsum(kept.shares), 1.0)
    assert set(range(len(kept.machines))) == set(turns_by_share(kept.shares))
    assert kept == stage or len(kept.machines) < len(stage.machines)
