"""Stages from a split by hand and from shards, and the errors of wrong ones."""

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.helpers.placement.layer_graphs import graph
from tvm_split.errors import PlanError
from tvm_split.placement.by_hand import Shard, Split, assign_layers, group_stages, stages_by_hand
from tvm_split.placement.graph import LayerGraph
from tvm_split.placement.problem import Axis, Sharding, Stage
from tvm_split.placement.request import PlanRequest

MACHINES = ("machine-a", "machine-b", "machine-c")
A, B, C = MACHINES
CHAIN = graph(
    {"conv1": [], "relu": ["conv1"], "block.0.conv": ["relu"], "block.0.norm": ["block.0.conv"], "fc": ["block.0.norm"]}
)
LONGER = graph(
    {
        "conv1": [],
        "relu": ["conv1"],
        "block.0.conv": ["relu"],
        "block.0.norm": ["block.0.conv"],
        "block.1.conv": ["block.0.norm"],
        "pool": ["block.1.conv"],
        "fc": ["pool"],
    }
)
MORE_OF_B = {A: 0.4, B: 0.6}
Held = list[tuple[tuple[str, ...], tuple[str, ...]]]


def shard(first: str, last: str, shares: Any = MORE_OF_B, axis: Axis = "rows") -> Shard:
    return Shard(first, last, axis, shares)


def held(stages: tuple[Stage, ...]) -> Held:
    return [(stage.machines, stage.layers) for stage in stages]


def sharded(layers: LayerGraph, shards: list[Shard], split: Split | None = None) -> tuple[Stage, ...]:
    return stages_by_hand(layers, split or {}, MACHINES, None, shards)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        # Unnamed layers go with the layers before them, at the beginning with the first named layer.
        ({B: ["block"], A: ["conv1"]}, [((A,), ("conv1", "relu")), ((B,), ("block.0.conv", "block.0.norm", "fc"))]),
        ({A: ["block"], B: ["fc"]}, [((A,), ("conv1", "relu", "block.0.conv", "block.0.norm")), ((B,), ("fc",))]),
        # The longest name counts.
        (
            {A: ["conv1", "block"], B: ["block.0.norm"]},
            [((A,), ("conv1", "relu", "block.0.conv")), ((B,), ("block.0.norm", "fc"))],
        ),
        # A machine may hold two stages.
        (
            {A: ["conv1", "fc"], B: ["block"]},
            [((A,), ("conv1", "relu")), ((B,), ("block.0.conv", "block.0.norm")), ((A,), ("fc",))],
        ),
    ],
)
def test_a_split_of_a_chain(split: dict[str, tuple[str, ...]], expected: Held) -> None:
    stages = stages_by_hand(CHAIN, split, MACHINES, None)
    assert held(stages) == expected
    assert [stage.name for stage in stages] == [f"stage_{number}" for number in range(len(expected))]


def test_a_name_is_no_prefix_of_half_a_word() -> None:
    layers = graph({"conv1": [], "conv10": ["conv1"]})
    assert assign_layers(layers, {"machine-a": ["conv1"], "machine-b": ["conv10"]}, MACHINES) == {
        "conv1": "machine-a",
        "conv10": "machine-b",
    }


def test_a_machine_gets_one_stage_where_that_is_possible() -> None:
    # The second layer of machine-a needs machine-b, but nothing of machine-b needs machine-a.
    branches = graph({"left": [], "right": [], "join": ["left", "right"]})
    stages = stages_by_hand(branches, {"machine-a": ["left", "join"], "machine-b": ["right"]}, MACHINES, None)
    assert held(stages) == [((B,), ("right",)), ((A,), ("left", "join"))]


def test_a_stage_that_would_wait_on_itself() -> None:
    split = {"machine-a": ["conv1", "fc"], "machine-b": ["block"]}
    with pytest.raises(PlanError, match=r"makes 3 stages, stages=2 .* stage would wait on itself.*stages=3"):
        stages_by_hand(CHAIN, split, MACHINES, 2)


def test_layers_that_need_each_other_must_be_together() -> None:
    circle = graph({"before": [], "first": ["before", "third"], "second": ["first"], "third": ["second"]})
    assert circle.units == (("before",), ("first", "second", "third"))
    with pytest.raises(
        PlanError, match=r"would wait on itself: 'first' and 'second' and 'third' .*machine-a and machine-b"
    ):
        stages_by_hand(circle, {"machine-a": ["first"], "machine-b": ["second"]}, MACHINES, None)
    assert len(stages_by_hand(circle, {"machine-a": ["first", "second"]}, MACHINES, None)) == 1


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[LayerGraph, dict[str, str]]:
    count = draw(st.integers(1, 9))
    names = [f"layer{index}" for index in range(count)]
    edges = {
        name: draw(st.lists(st.sampled_from(names[:index]), unique=True)) if index else []
        for index, name in enumerate(names)
    }
    return graph(edges), {name: draw(st.sampled_from(MACHINES)) for name in names}


@given(placed_graphs())
def test_stages_are_complete_convex_and_ordered(placed: tuple[LayerGraph, dict[str, str]]) -> None:
    layers, machine_of = placed
    groups = group_stages(layers, machine_of)
    stage_of = {layer: index for index, group in enumerate(groups) for layer in group}
    assert sorted(stage_of) == sorted(layers.layers)
    for group in groups:
        assert len({machine_of[layer] for layer in group}) == 1
    for layer in layers.layers:
        # No stage needs a later one, so there is no cycle.
        assert all(stage_of[before] <= stage_of[layer] for before in layers.predecessors[layer])


def test_one_shard_needs_no_list() -> None:
    single = shard("conv1", "relu")
    for shards in (single, [single], iter([single])):
        assert PlanRequest(shards=shards).shards == (single,)
    assert PlanRequest(shards=None).shards == ()


@pytest.mark.parametrize(
    "value",
    [
        "conv1..relu:rows",
        {A: 0.5},
        shard("conv1", "fc", [A, B]),
        shard("conv1", "fc", {A: 1.0, B: 0.0}),
        shard("conv1", 3),  # type: ignore[arg-type]
        shard("conv1", "fc", axis="row"),  # type: ignore[arg-type]
        Shard("conv1", "fc", "rows", MORE_OF_B, "all"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_shard_is_said(value: Any) -> None:
    with pytest.raises(PlanError, match="shards"):
        PlanRequest(shards=value)


def test_names_stand_for_all_below_them() -> None:
    stages = sharded(LONGER, [shard("block.0", "block")])
    # The other layers are on the machine with the largest share.
    assert held(stages) == [
        ((B,), ("conv1", "relu")),
        ((A, B), ("block.0.conv", "block.0.norm", "block.1.conv")),
        ((B,), ("pool", "fc")),
    ]
    assert (stages[1].shares, stages[1].sharding) == ((0.4, 0.6), Sharding("rows", "fused"))


def test_other_layers_follow_the_one_before_or_the_split() -> None:
    shards = [shard("fc", "fc", {C: 0.7, B: 0.3}), shard("relu", "block.0")]
    assert held(sharded(LONGER, shards)) == [
        ((B,), ("conv1",)),
        ((A, B), ("relu", "block.0.conv", "block.0.norm")),
        ((B,), ("block.1.conv", "pool")),
        ((C, B), ("fc",)),
    ]
    split = {C: ["conv1", "fc"], A: ["block.1"]}
    assert held(sharded(LONGER, [shard("block.0", "block.0")], split)) == [
        ((C,), ("conv1", "relu")),
        ((A, B), ("block.0.conv", "block.0.norm")),
        ((A,), ("block.1.conv", "pool")),
        ((C,), ("fc",)),
    ]


def test_shares_that_nearly_add_up_do_after() -> None:
    (stage,) = sharded(LONGER, [shard("conv1", "fc", dict.fromkeys(MACHINES, 0.333))])
    assert stage.shares == pytest.approx((1 / 3,) * 3)
    assert math.fsum(stage.shares) == pytest.approx(1.0, abs=1e-12)


def test_tables_make_no_stage_of_their_own() -> None:
    layers = graph(
        {"table": [], "embed": ["table"], "mask": [], "attend": ["embed", "mask"], "scale": []},
        independent=("table", "mask", "scale"),
    )
    for first, last, expected in (
        ("attend", "attend", [((B,), ("table", "embed", "mask")), ((A, B), ("attend", "scale"))]),
        ("embed", "embed", [((A, B), ("table", "embed", "mask")), ((B,), ("attend", "scale"))]),
        ("table", "mask", [((A, B), ("table", "embed", "mask")), ((B,), ("attend", "scale"))]),
    ):
        assert held(sharded(layers, [shard(first, last)])) == expected


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"machine-x": ["conv1"]}, r"names machine 'machine-x'; the cluster has machine-a, machine-b, machine-c"),
        ({A: ["conv2"]}, r"'machine-a' the layer 'conv2', which the model does not have; near it are 'conv1'"),
        ({A: ["conv1"], B: ["conv1"]}, r"'conv1' to both 'machine-a' and 'machine-b'"),
        ([shard("conv1", "fc", {A: 0.5, "machine-x": 0.5})], "names machine 'machine-x'; the cluster has machine-a, "),
        ([shard("conv9", "fc")], "'conv9', which the model does not have; near it are 'conv1'"),
        ([shard("conv1", "fd")], "'fd', which the model does not have"),
        ([shard("conv1", "fc", {A: 1.0})], "names 1 of the machines; give shares to two at least, or leave it out"),
        ([shard("conv1", "fc", {A: 0.5, B: 0.4})], "the shares of .* add up to 0.9; .* make them 1"),
        ([shard("fc", "relu")], "rows from 'fc' to 'relu' ends before it begins: 'relu' is executed before 'fc'"),
        (
            [shard("conv1", "block.0"), shard("block", "fc", axis="channels")],
            "layer 'block.0.conv' is in the shard of rows from 'conv1' to 'block.0' and in the shard of channels from",
        ),
    ],
)
def test_what_cannot_be_is_refused(split: dict[str, tuple[str, ...]] | list[Shard], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sharded(LONGER, split) if isinstance(split, list) else stages_by_hand(LONGER, split, MACHINES)


@pytest.mark.parametrize("name", ["block.0", "block.0.norm"])
def test_a_split_cannot_have_what_a_shard_has(name: str) -> None:
    """A name that also matches layers outside a shard applies to those."""
    only = [shard("block.0", "block.0")]
    message = f"split gives machine 'machine-c' the layer '{name}', which is in the shard of rows from 'block.0' to"
    with pytest.raises(PlanError, match=f"{message} 'block.0'; take it out of the split"):
        sharded(LONGER, only, {A: ["conv1"], C: [name]})
    assert held(sharded(LONGER, only, {A: ["conv1"], C: ["block"]})) == [
        ((A,), ("conv1", "relu")),
        ((A, B), ("block.0.conv", "block.0.norm")),
        ((C,), ("block.1.conv", "pool", "fc")),
    ]
