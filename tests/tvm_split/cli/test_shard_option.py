"""``--shard``: the parsing of the text, and the use of such a plan on the command line."""

import json

import pytest

from tvm_split.errors import PlanError
from tvm_split.placement.by_hand import Shard

A, B = "machine-a", "machine-b"
HALVES = {A: 0.5, B: 0.5}
ROWS = f"conv_1..conv_2:rows:{A}=0.5,{B}=0.5"


@pytest.mark.parametrize(
    ("text", "shard"),
    [
        (ROWS, Shard("conv_1", "conv_2", "rows", HALVES)),
        (f"{ROWS}:each", Shard("conv_1", "conv_2", "rows", HALVES, "each")),
        (f"fc:channels: {A} = .5 , {B} = 0.5", Shard("fc", "fc", "channels", HALVES)),
        # Names as exporters write them; those of machines may be anything, too.
        (f"/a/b:0../a/c:1:heads:{A}=0.5,{B}=0.5", Shard("/a/b:0", "/a/c:1", "heads", HALVES)),
        (f"a:rows:b..c:rows:{A}=0.5,{B}=0.5", Shard("a:rows:b", "c", "rows", HALVES)),
        ("a..b:rows:tcp:1=0.5,k=v=0.5", Shard("a", "b", "rows", {"tcp:1": 0.5, "k=v": 0.5})),
        ("a..b:rows:m=2", Shard("a", "b", "rows", {"m": 2.0})),  # refused by the planner, with the reason
        (
            f"{{first: x..y, last: z, axis: batch, shares: {{{A}: 0.5, {B}: 0.5}}}}",
            Shard("x..y", "z", "batch", HALVES),
        ),
    ],
)
def test_what_a_text_says(text, shard):
    assert Shard.parse(text) == shard


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv_1..conv_2", "'conv_1..conv_2' is not FIRST..LAST:AXIS:MACHINE=SHARE,MACHINE=SHARE[:EXCHANGE]"),
        (f"conv_1:row:{A}=1", "AXIS is rows, columns, channels, heads, batch; EXCHANGE fused or each"),
        (f"conv_1:rows:{A}=0.5,{B}", f"has '{B}', which is not MACHINE=SHARE"),
        (f"conv_1:rows:{A}=0.5,{A}=0.5", f"has two shares for '{A}'"),
    ],
)
def test_what_cannot_be_read_is_said(text, message):
    with pytest.raises(PlanError) as caught:
        Shard.parse(text)
    assert message in str(caught.value)


def test_a_plan_with_shards_in_all_its_forms(invoke, invoke_json, onnx_path, tmp_path):
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    options = ("plan", onnx_path, "--shard", ROWS, "--split", f"{B}=flatten", "--predict", "--estimate")
    content = invoke_json(*options, "--output", path, "--picture", picture)
    assert [(stage["machines"], stage["shares"], stage["layers"]) for stage in content["stages"]] == [
        ([A, B], [0.5, 0.5], ["conv_1", "relu_1", "conv_2"]),
        ([B], [1.0], ["flatten", "dense"]),
    ]
    assert [stage["sharding"] for stage in content["stages"]] == [{"axis": "rows", "exchange": "fused"}, None]
    assert {machine["machine"] for machine in content["prediction"]["machines"]} == {A, B}
    assert json.loads(path.read_text()) == content["plan"]
    for shown in (invoke(*options).stdout, picture.read_text()):
        assert "machine-a 0.5 and machine-b 0.5 of the rows" in " ".join(shown.split())
        assert "schedule" not in shown
