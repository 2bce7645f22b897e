from __future__ import annotations

import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.placements import STAGE_OF, Whole, placement
from tvm_split.relay_passes.annotate import AnnotateDevices
from tvm_split.relay_passes.errors import ContractError, SelfWaitError
from tvm_split.relay_passes.partition import PartitionStages
from tvm_split.relay_passes.verify_partition import VerifyPartition


def test_a_right_partition_passes(whole: tvm.IRModule) -> None:
    partitioned = PartitionStages()(AnnotateDevices(placement())(whole))
    tvm.ir.assert_structural_equal(VerifyPartition(whole)(partitioned), partitioned)


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
    partitioned = PartitionStages()(AnnotateDevices(placement())(whole))
    text = partitioned.script(show_meta=True)
    assert right in text
    with pytest.raises(ContractError, match="not that of the original function"):
        VerifyPartition(whole)(tvm.script.from_source(text.replace(right, wrong)))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=len(STAGE_OF), max_size=len(STAGE_OF)), st.permutations("aabc"))
def test_every_placement_is_verified_or_refused(stages: list[int], machines: list[str]) -> None:
    """Whatever the placement: either a clear refusal, or stages that together are the original function."""
    try:
        annotated = AnnotateDevices(placement(dict(zip(STAGE_OF, stages, strict=True)), tuple(machines)))(Whole)
    except (SelfWaitError, ContractError):
        return
    VerifyPartition(Whole)(PartitionStages()(annotated))
