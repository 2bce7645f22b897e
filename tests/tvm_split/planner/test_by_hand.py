from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tests.helpers.planner.layer_graphs import graph
from tvm_split.errors import PlanError
from tvm_split.planner.by_hand import assign_layers, group_stages, stages_by_hand
from tvm_split.planner.graph import LayerGraph

CHAIN = graph(
    {"conv1": [], "relu": ["conv1"], "block.0.conv": ["relu"], "block.0.norm": ["block.0.conv"], "fc": ["block.0.norm"]}
)
MACHINES = ("machine-a", "machine-b", "machine-c")


def shape_of(stages) -> list[tuple[str, tuple[str, ...]]]:
    return [(stage.machine, stage.layers) for stage in stages]


def test_layers_not_named_go_with_those_before() -> None:
    stages = stages_by_hand(CHAIN, {"machine-b": ["block"], "machine-a": ["conv1"]}, MACHINES, None)
    assert shape_of(stages) == [
        ("machine-a", ("conv1", "relu")),
        ("machine-b", ("block.0.conv", "block.0.norm", "fc")),
    ]
    assert [stage.name for stage in stages] == ["stage_0", "stage_1"]


def test_layers_before_the_first_named_go_with_it() -> None:
    stages = stages_by_hand(CHAIN, {"machine-a": ["block"], "machine-b": ["fc"]}, MACHINES, None)
    assert shape_of(stages)[0] == ("machine-a", ("conv1", "relu", "block.0.conv", "block.0.norm"))


def test_the_longest_name_counts() -> None:
    machine_of = assign_layers(CHAIN, {"machine-a": ["conv1", "block"], "machine-b": ["block.0.norm"]}, MACHINES)
    assert machine_of["block.0.conv"] == "machine-a"
    assert machine_of["block.0.norm"] == "machine-b"


def test_a_name_is_no_prefix_of_half_a_word() -> None:
    layers = graph({"conv1": [], "conv10": ["conv1"]})
    assert assign_layers(layers, {"machine-a": ["conv1"], "machine-b": ["conv10"]}, MACHINES) == {
        "conv1": "machine-a",
        "conv10": "machine-b",
    }


def test_a_machine_may_hold_two_stages() -> None:
    stages = stages_by_hand(CHAIN, {"machine-a": ["conv1", "fc"], "machine-b": ["block"]}, MACHINES, None)
    assert [stage.machine for stage in stages] == ["machine-a", "machine-b", "machine-a"]


def test_a_machine_gets_one_stage_where_that_is_possible() -> None:
    # The second layer of machine-a needs machine-b, but nothing of machine-b needs machine-a.
    branches = graph({"left": [], "right": [], "join": ["left", "right"]})
    stages = stages_by_hand(branches, {"machine-a": ["left", "join"], "machine-b": ["right"]}, MACHINES, None)
    assert shape_of(stages) == [("machine-b", ("right",)), ("machine-a", ("left", "join"))]


def test_tables_go_with_the_layers_around_them() -> None:
    layers = graph({"embed": [], "mask": [], "attend": ["embed", "mask"]}, independent=("mask",))
    stages = stages_by_hand(layers, {"machine-a": ["embed"], "machine-b": ["attend"]}, MACHINES, None)
    assert sorted(layer for stage in stages for layer in stage.layers) == ["attend", "embed", "mask"]
    assert len(stages) == 2


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"machine-x": ["conv1"]}, r"names machine 'machine-x'; the cluster has machine-a, machine-b, machine-c"),
        (
            {"machine-a": ["conv2"]},
            r"'machine-a' the layer 'conv2', which the model does not have; near it are 'conv1'",
        ),
        ({"machine-a": ["conv1"], "machine-b": ["conv1"]}, r"'conv1' to both 'machine-a' and 'machine-b'"),
        ({"machine-a": []}, r"'machine-a' no layers; leave it out"),
        ({"machine-a": "conv1"}, r"the string 'conv1'; give a list"),
        ({}, r"split names no layer"),
    ],
)
def test_wrong_splits(split, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stages_by_hand(CHAIN, split, MACHINES, None)


def test_a_stage_that_would_wait_on_itself() -> None:
    split = {"machine-a": ["conv1", "fc"], "machine-b": ["block"]}
    with pytest.raises(PlanError, match=r"makes 3 stages, stages=2 .* machine-a would wait on itself.*stages=3"):
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
        # No stage needs a later one: so none can wait on itself.
        assert all(stage_of[before] <= stage_of[layer] for before in layers.predecessors[layer])
