"""Plans with shards from a user's words: which stages they make, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.planner.layer_graphs import graph
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Axis, Exchange, Sharding, Stage
from tvm_split.planner.request import PlanRequest
from tvm_split.planner.shard import Shard, sharding_words
from tvm_split.planner.shards_by_hand import stages_with_shards

MACHINES = ("machine-a", "machine-b", "machine-c")
A, B, C = MACHINES
CHAIN = graph(
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


def shard(first: str, last: str, shares: dict[str, float] = MORE_OF_B, axis: Axis = "rows") -> Shard:
    return Shard(first, last, axis, shares)


def held(stages: tuple[Stage, ...]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(stage.machines, stage.layers) for stage in stages]


def test_one_shard_needs_no_list() -> None:
    one = shard("conv1", "relu")
    for given in (one, [one], iter([one])):
        assert PlanRequest(shards=given).shards == (one,)
    assert PlanRequest(shards=None).shards == ()


@pytest.mark.parametrize("given", ["conv1..relu:rows", [("conv1", "relu")], {A: 0.5}, 1])
def test_what_is_no_shard_is_said(given: Any) -> None:
    with pytest.raises(PlanError, match="shards"):
        PlanRequest(shards=given)


def test_names_stand_for_all_below_them() -> None:
    (before, shared, behind) = stages_with_shards(CHAIN, [shard("block.0", "block")], None, MACHINES)
    assert shared == Stage(
        (A, B), ("block.0.conv", "block.0.norm", "block.1.conv"), (0.4, 0.6), sharding=Sharding("rows", "fused")
    )
    # Those around it are on the machine with the largest share.
    assert before == Stage((B,), ("conv1", "relu"))
    assert behind == Stage((B,), ("pool", "fc"))


def test_layers_between_shards_follow_the_one_before() -> None:
    shards = [shard("fc", "fc", {C: 0.7, B: 0.3}), shard("relu", "block.0")]
    assert held(stages_with_shards(CHAIN, shards, None, MACHINES)) == [
        ((B,), ("conv1",)),
        ((A, B), ("relu", "block.0.conv", "block.0.norm")),
        ((B,), ("block.1.conv", "pool")),
        ((C, B), ("fc",)),
    ]


def test_a_split_is_for_the_other_layers() -> None:
    split = {C: ["conv1", "fc"], A: ["block.1"]}
    assert held(stages_with_shards(CHAIN, [shard("block.0", "block.0")], split, MACHINES)) == [
        ((C,), ("conv1", "relu")),
        ((A, B), ("block.0.conv", "block.0.norm")),
        ((A,), ("block.1.conv", "pool")),
        ((C,), ("fc",)),
    ]


def test_shards_may_follow_each_other() -> None:
    shards = [shard("conv1", "block.0"), shard("block.1", "fc", axis="channels")]
    stages = stages_with_shards(CHAIN, shards, None, MACHINES)
    assert [(len(stage.layers), stage.sharding) for stage in stages] == [
        (4, Sharding("rows")),
        (3, Sharding("channels")),
    ]


def test_shares_that_nearly_add_up_do_after() -> None:
    (stage,) = stages_with_shards(CHAIN, [shard("conv1", "fc", dict.fromkeys(MACHINES, 0.333))], None, MACHINES)
    assert stage.shares == pytest.approx((1 / 3,) * 3)
    assert math.fsum(stage.shares) == pytest.approx(1.0, abs=1e-12)


def test_tables_make_no_stage_of_their_own() -> None:
    layers = graph(
        {"table": [], "embed": ["table"], "mask": [], "attend": ["embed", "mask"], "scale": []},
        independent=("table", "mask", "scale"),
    )
    for first, last, expected in (
        ("attend", "attend", [((B,), ("table", "embed", "mask")), ((A, B), ("attend", "scale"))]),
        ("embed", "embed", [((A, B), ("table", "embed")), ((B,), ("mask", "attend", "scale"))]),
        ("table", "mask", [((A, B), ("table", "embed", "mask")), ((B,), ("attend", "scale"))]),
    ):
        assert held(stages_with_shards(layers, [shard(first, last)], None, MACHINES)) == expected


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([shard("conv1", "fc", {A: 0.5, "machine-x": 0.5})], "names machine 'machine-x'; the cluster has machine-a, "),
        ([shard("conv9", "fc")], "'conv9', which the model does not have; near it are 'conv1'"),
        ([shard("conv1", "fd")], "'fd', which the model does not have"),
        ([shard("conv", "fc")], "'conv', which the model does not have"),
        ([shard("conv1", "fc", {A: 1.0})], "names 1 of the machines; give shares to two at least, or leave it out"),
        (
            [shard("conv1", "fc", [A, B])],
            r"has the shares \['machine-a', .*; give each machine's, like \{'machine-a': 0.5",
        ),  # type: ignore[arg-type]
        ([shard(None, "fc")], "has the first layer None; give a layer's name"),  # type: ignore[arg-type]
        ([shard("conv1", 3)], "has the last layer 3; give a layer's name"),  # type: ignore[arg-type]
        ([shard("conv1", "fc", {})], "names 0 of the machines; give shares to two at least"),
        ([shard("conv1", "fc", {A: 1.0, B: 0.0})], "gives 'machine-b' a share of 0.0; leave it out"),
        ([shard("conv1", "fc", {A: 1.5, B: -0.5})], "gives 'machine-b' a share of -0.5"),
        ([shard("conv1", "fc", {A: 0.5, B: math.nan})], "gives 'machine-b' a share of nan"),
        ([shard("conv1", "fc", {A: 0.5, B: math.inf})], "gives 'machine-b' a share of inf"),
        ([shard("conv1", "fc", {A: 0.5, B: "0.5"})], "gives 'machine-b' a share of '0.5'; a share is a number"),  # type: ignore[dict-item]
        ([shard("conv1", "fc", {A: 0.5, B: 0.4})], "the shares of .* add up to 0.9; .* make them 1"),
        ([shard("conv1", "fc", {A: 60, B: 40})], "add up to 100"),
        (
            [shard("fc", "relu")],
            "rows from 'fc' to 'relu' ends before it begins: 'relu' is executed before 'fc'; exchange them",
        ),
        ([shard("conv1", "fc", axis="row")], "has the axis 'row'; it can be rows, columns, channels, heads, batch"),  # type: ignore[arg-type]
        (
            [Shard("conv1", "fc", "rows", MORE_OF_B, "all")],  # type: ignore[arg-type]
            "has the exchange 'all'; it can be fused, each",
        ),
        (
            [shard("conv1", "block.0"), shard("block", "fc", axis="channels")],
            "layer 'block.0.conv' is in the shard of rows from 'conv1' to 'block.0' and in the shard of channels from",
        ),
    ],
)
def test_what_cannot_be_is_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stages_with_shards(CHAIN, shards, None, MACHINES)


@pytest.mark.parametrize("name", ["block.0", "block.0.norm"])
def test_a_split_cannot_have_what_a_shard_has(name: str) -> None:
    """A name that has layers around a shard, too, is for these."""
    only = [shard("block.0", "block.0")]
    message = f"split gives machine 'machine-c' the layer '{name}', which is in the shard of rows from 'block.0' to"
    with pytest.raises(PlanError, match=f"{message} 'block.0'; take it out of the split"):
        stages_with_shards(CHAIN, only, {A: ["conv1"], C: [name]}, MACHINES)
    assert held(stages_with_shards(CHAIN, only, {A: ["conv1"], C: ["block"]}, MACHINES)) == [
        ((A,), ("conv1", "relu")),
        ((A, B), ("block.0.conv", "block.0.norm")),
        ((C,), ("block.1.conv", "pool", "fc")),
    ]


@pytest.mark.parametrize(
    ("axis", "exchange", "travels"),
    [
        ("rows", "fused", "rows beyond a part are computed twice"),
        ("columns", "each", "columns beyond a part are exchanged at each window"),
        ("channels", "fused", "sums travel, one for two layers"),
        ("heads", "each", "outputs are gathered for each product"),
        ("batch", "each", "nothing travels between them"),
    ],
)
def test_in_words(axis: Axis, exchange: Exchange, travels: str) -> None:
    stage = Stage(MACHINES, ("conv1",), (0.5, 0.3, 0.2), sharding=Sharding(axis, exchange))
    assert sharding_words(stage) == f"machine-a 0.5, machine-b 0.3 and machine-c 0.2 of the {axis}; {travels}"
    assert sharding_words(Stage(MACHINES, ("conv1",), (0.5, 0.3, 0.2))) == ""
