"""Pictures of plans: valid XML, text as text, names escaped."""

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import tvm_split
from tests.helpers.frontends.onnx_cases import node_model
from tests.helpers.placement.predictions import machine_prediction, prediction
from tests.models.small_onnx_model import small_model
from tvm_split.errors import PlanError
from tvm_split.pictures.plan_picture import MOST_NODES, PictureGraph, draw_plan, picture_graph
from tvm_split.pictures.timeline import COLOURS
from tvm_split.placement.problem import Sharding

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
    assert any("predicted: 100 micro-batches/s" in text for text in shown)
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
    proto = node_model("Relu", [np.ones((2, 3), np.float32)])
    proto.graph.node[0].name = HOSTILE
    model = tvm_split.load_model(proto)
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


CLUSTER = tvm_split.Cluster.in_process(machines=2, threads=1)


class Branches(torch.nn.Module):
    """``left`` and ``right`` both need ``first``; ``sum`` needs both; the model returns ``first``'s result too."""

    def __init__(self, table: bool = False):
        super().__init__()
        self.first, self.left, self.right, self.last = (torch.nn.Linear(4, 4) for _ in range(4))
        self.table = table

    def forward(self, x):
        x = self.first(x)
        y = torch.relu(self.left(x)) + torch.tanh(self.right(x))
        if self.table:
            y = y + torch.arange(4).to(torch.float32) * 2
        return self.last(y), x


def drawn(network, inputs, **options) -> PictureGraph:
    model = tvm_split.load_model(network.eval(), inputs)
    return picture_graph(model, tvm_split.plan(model, CLUSTER, **options))


def edges_of(graph: PictureGraph):
    """Return the edges by the names of their ends' first layers."""

    def name(number):
        layers = graph.nodes[number].layers
        return layers[0] if layers else ("inputs" if number == 0 else "outputs")

    return {(name(edge.source), name(edge.destination)): edge for edge in graph.edges}


def test_what_passes_between_stages_that_machines_share_crosses():
    halves = {A: 0.5, B: 0.5}
    shards = [
        tvm_split.Shard("first", "relu", "channels", halves),
        tvm_split.Shard("right", "last", "channels", halves),
    ]
    graph = drawn(Branches(), (torch.zeros(2, 4),), shards=shards)
    assert {node.machines for node in graph.nodes[1:-1]} == {(A, B)}
    assert all(node.sharded for node in graph.nodes[1:-1])
    crossing = {ends for ends, edge in edges_of(graph).items() if edge.crosses}
    # The same machines on both sides, but each has only its part.
    assert crossing == {
        ("inputs", "first"), ("first", "right"), ("relu", "add"), ("last", "outputs"), ("first", "outputs")
    }  # fmt: skip


def test_a_tensor_is_counted_once_for_each_machine():
    graph = drawn(Branches(), (torch.zeros(2, 4),), split={A: ["first"], B: ["left", "right", "last"]})
    edges = edges_of(graph)
    assert edges["first", "left"].crosses
    assert edges["first", "right"].crosses
    assert edges["first", "left"].bytes + edges["first", "right"].bytes == 32


def test_layers_without_inputs_are_not_drawn():
    graph = drawn(Branches(table=True), (torch.zeros(2, 4),), stages=1)
    assert set(graph.hidden).isdisjoint(layer for node in graph.nodes for layer in node.layers)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.side = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return torch.relu(self.down(torch.relu(self.up(x))) + self.side(x)) + x


@pytest.mark.parametrize("blocks", [20, pytest.param(70, marks=pytest.mark.slow)])
def test_many_layers_are_drawn_in_runs(blocks):
    network = torch.nn.Sequential(*(Block() for _ in range(blocks)))
    model = tvm_split.load_model(network.eval(), (torch.zeros(1, 4),))
    plan = tvm_split.plan(model, CLUSTER)
    graph = picture_graph(model, plan)
    assert len(graph.nodes) <= MOST_NODES + 2 * len(plan.stages)
    assert [layer for node in graph.nodes for layer in node.layers] == list(model.layer_names)
    for node in graph.nodes[1:-1]:
        assert set(node.layers) <= set(plan.stages[node.stage].layers)
    assert all(edge.source < edge.destination for edge in graph.edges)
    assert sum(edge.crosses for edge in graph.edges) >= 3
