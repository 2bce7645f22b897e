from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from hypothesis import given, settings, strategies as st

from relay_passes.ir import ContractError, SelfWaitError
from relay_passes.partition import Computation, partition
from relay_passes.pipeline import cut
from relay_passes.verify_partition import verify_partition
from tests.helpers.placements import STAGE_OF, Whole, placement


def rewritten(stage: Computation, right: str, wrong: str) -> Computation:
    text = tvm.IRModule({stage.name: stage.function}).script(show_meta=True)
    return replace(stage, function=tvm.script.from_source(text.replace(right, wrong))[stage.name])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("R.add(joined, conv1)", "R.add(conv1, joined)"),
        ("R.multiply(left, y)", "R.add(left, y)"),
        ("R.concat((conv2, conv3), axis=1)", "R.concat((conv3, conv2), axis=1)"),
        ("halves[0]", "halves[1]"),
    ],
)
def test_a_wrong_partition_is_refused(whole: tvm.IRModule, right: str, wrong: str) -> None:
    stages = partition(whole, placement())
    assert sum(right in stage.function.script() for stage in stages) == 1
    verify_partition(whole, [rewritten(stage, right, right) for stage in stages])
    with pytest.raises(ContractError, match="not that of the original function"):
        verify_partition(whole, [rewritten(stage, right, wrong) for stage in stages])


def test_stages_in_a_wrong_order_are_refused(whole: tvm.IRModule) -> None:
    first, *rest = partition(whole, placement())
    with pytest.raises(ContractError, match="receives 'left', which no stage before it sends"):
        verify_partition(whole, [*rest, first])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=len(STAGE_OF), max_size=len(STAGE_OF)), st.permutations("aabc"))
def test_every_placement_is_verified_or_refused(stages: list[int], machines: list[str]) -> None:
    """Whatever the placement: either a clear refusal, or stages that together are the original function."""
    placed = placement(dict(zip(STAGE_OF, stages, strict=True)), tuple(machines))
    try:
        partition(Whole, placed)
    except (SelfWaitError, ContractError):
        return
    cut(Whole, placed)
