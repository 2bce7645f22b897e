from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings, strategies as st

from relay_passes.ir import ContractError, SelfWaitError
from relay_passes.partition import Computation, verify_partition
from tests.helpers import placements
from tests.helpers.placements import STAGE_OF, Whole, run


def partition(module: tvm.IRModule, stage_of: Mapping[str, int] = STAGE_OF, machines: str = "aba") -> list[Computation]:
    return [computation for _, computation in placements.partition(module, stage_of, machines)]


def test_borders() -> None:
    stages = partition(Whole)
    assert [stage.name for stage in stages] == ["stage_0", "stage_1", "stage_2"]
    assert [stage.received for stage in stages] == [("x",), ("left", "y", "right"), ("joined", "conv1")]
    assert [stage.sent for stage in stages] == [("conv1", "left", "right"), ("joined", "other"), ("skip",)]
    for stage in stages:
        assert stage.received == tuple(parameter.name for parameter in stage.function.params)


def test_value_without_inputs_is_made_where_it_is_needed() -> None:
    assert ["R.ones(" in stage.function.script() for stage in partition(Whole)] == [False, True, False]
    both = partition(Whole, {**STAGE_OF, "other": 2})
    assert ["R.ones(" in stage.function.script() for stage in both] == [False, True, True]


def test_stages_called_in_turn_give_the_whole() -> None:
    x, y = (
        np.random.default_rng(seed).standard_normal((1, size)).astype("float32") for seed, size in ((0, 16), (1, 8))
    )
    values = {"x": x, "y": y}
    for stage in partition(Whole):
        module = tvm.IRModule({"main": stage.function.with_attr("global_symbol", "main")})
        results = run(module, *[values[name] for name in stage.received])
        values.update(zip(stage.sent, results, strict=True))
    for name, right in zip(["skip", "x", "other", "y", "other"], run(Whole, x, y), strict=True):
        np.testing.assert_array_equal(values[name], right)


def test_a_stage_that_needs_a_later_one_is_refused() -> None:
    with pytest.raises(SelfWaitError, match=r"'skip' in stage_0 needs 'joined', which is computed in stage_1"):
        partition(Whole, {**STAGE_OF, "skip": 0})


@pytest.mark.parametrize(
    ("stage_of", "machines", "message"),
    [
        ({**STAGE_OF, "left": 1}, "aba", r"'halves' is a .* not a tensor"),
        (
            {name: stage for name, stage in STAGE_OF.items() if name != "joined"},
            "aba",
            "no stage is named for 'joined'",
        ),
        (STAGE_OF, "abac", "'stage_3' has no operation"),
    ],
)
def test_what_is_no_partition_is_refused(stage_of: dict[str, int], machines: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        partition(Whole, stage_of, machines)


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
def test_a_wrong_partition_is_refused(right: str, wrong: str) -> None:
    stages = partition(Whole)
    assert sum(right in stage.function.script() for stage in stages) == 1
    verify_partition(Whole, [rewritten(stage, right, right) for stage in stages])
    with pytest.raises(ContractError, match="not that of the original function"):
        verify_partition(Whole, [rewritten(stage, right, wrong) for stage in stages])


def test_stages_in_a_wrong_order_are_refused() -> None:
    first, *rest = partition(Whole)
    with pytest.raises(ContractError, match="receives 'left', which no stage before it sends"):
        verify_partition(Whole, [*rest, first])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=len(STAGE_OF), max_size=len(STAGE_OF)), st.permutations("aabc"))
def test_every_placement_is_verified_or_refused(stages: list[int], machines: list[str]) -> None:
    try:
        computations = partition(Whole, dict(zip(STAGE_OF, stages, strict=True)), "".join(machines))
    except (SelfWaitError, ContractError):
        return
    verify_partition(Whole, computations)
