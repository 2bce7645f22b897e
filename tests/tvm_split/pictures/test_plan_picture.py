"""Pictures of plans: valid XML, text as text, names escaped."""

import dataclasses
import re
from xml.etree import ElementTree

import onnx
import pytest
from onnx import TensorProto, helper

import tvm_split
from tests.helpers.planner.predictions import machine_prediction, prediction
from tests.models.small_onnx_model import small_model
from tvm_split.errors import PlanError
from tvm_split.pictures.colours import COLOURS
from tvm_split.pictures.plan_picture import draw_plan
from tvm_split.planner.problem import Sharding

SVG = "{http://www.w3.org/2000/svg}"
A, B = "machine-a", "machine-b"
HOSTILE = '<script>alert("1")</script> & \x07 ]]> [bold]'


@pytest.fixture(scope="module")
def planned():
    model = tvm_split.load_model(small_model())
    cluster = tvm_split.Cluster.in_process(machines=2, threads=1)
    return model, tvm_split.plan(model, cluster, split={A: ["conv_1", "relu_1"], B: ["conv_2"]})


def texts(path):
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return [element.text for element in root.iter(f"{SVG}text")]


def test_layers_machines_bytes_and_predictions(planned, tmp_path):
    model, plan = planned
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.005)))
    draw_plan(model, dataclasses.replace(plan, prediction=expected), tmp_path / "plan.svg")
    shown = texts(tmp_path / "plan.svg")
    assert set(model.layer_names) <= set(shown)
    assert "machine-b: 3 layers; compute 5 ms, receive 1 ms, send 2 ms" in shown
    assert any("predicted: 100 micro-batches a second" in text for text in shown)
    assert shown.count("2.3 kB") == 1  # what goes from A to B: 2 x 8 x 6 x 6 floats
    content = (tmp_path / "plan.svg").read_text()
    assert set(COLOURS[:2]) <= set(re.findall("#[0-9A-F]{6}", content))
    for outside in ("href", "url(", "@import", "<script", "<style"):
        assert outside not in content


@pytest.mark.parametrize(
    ("stage", "changes", "lines"),
    [
        (
            1,
            {"machines": (B, "machine-c"), "shares": (0.5, 0.5)},
            ["machine-b: 3 layers, replicas with machine-c", "machine-c: 3 layers, replicas with machine-b"],
        ),
        (
            0,
            {"machines": (A, B), "shares": (0.75, 0.25), "sharding": Sharding("rows", "each")},
            ["machine-a: 2 layers, shards with machine-b", "machine-b: 5 layers, shards with machine-a"],
        ),
    ],
    ids=["replicas", "shards"],
)
def test_a_stage_of_several_machines_names_all(planned, tmp_path, stage, changes, lines):
    model, plan = planned
    stages = list(plan.stages)
    stages[stage] = dataclasses.replace(stages[stage], **changes)
    draw_plan(model, dataclasses.replace(plan, stages=tuple(stages)), tmp_path / "plan.svg")
    shown = texts(tmp_path / "plan.svg")
    assert set(lines) <= set(shown)
    kind, layers = lines[0].split()[3], len(stages[stage].layers)
    assert shown.count(f"{kind}: {', '.join(changes['machines'])}") == layers
    assert any("of the rows" in text for text in shown) == (kind == "shards")


def test_any_name_is_only_text(tmp_path):
    node = helper.make_node("Relu", ["x"], ["y"], name=HOSTILE)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    proto = helper.make_model(helper.make_graph([node], "hostile", values[:1], values[1:]), ir_version=9)
    model = tvm_split.load_model(onnx.ModelProto.FromString(proto.SerializeToString()))
    plan = tvm_split.plan(model, tvm_split.Cluster.in_process())
    draw_plan(model, plan, tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert not list(root.iter(f"{SVG}script"))
    assert any("\ufffd ]]> [bold]" in (element.text or "") for element in root.iter(f"{SVG}text"))


def test_wrong_use(planned, tmp_path):
    model, plan = planned
    with pytest.raises(PlanError, match=r"does not end in \.svg"):
        draw_plan(model, plan, tmp_path / "plan.png")
    with pytest.raises(PlanError, match="places no layer 'conv_1'"):
        draw_plan(model, dataclasses.replace(plan, stages=plan.stages[1:]), tmp_path / "plan.svg")
    assert not (tmp_path / "plan.svg").exists()
