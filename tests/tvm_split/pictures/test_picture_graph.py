"""The graph that is drawn for a model: nodes, edges between machines and their bytes."""

import pytest
import torch

import tvm_split
from tvm_split.pictures.plan_picture import MOST_NODES, PictureGraph, picture_graph

CLUSTER = tvm_split.Cluster.in_process(machines=2, threads=1)
A, B = "machine-a", "machine-b"


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


def test_every_layer_of_a_small_network_is_a_node():
    graph = drawn(Branches(), (torch.zeros(2, 4),), split={A: ["first", "left", "relu"], B: ["right", "tanh", "add"]})
    assert [node.layers for node in graph.nodes[1:-1]] == [
        ("first",), ("left",), ("relu",), ("right",), ("tanh",), ("add",), ("last",)
    ]  # fmt: skip
    assert {node.machines for node in graph.nodes[1:4]} == {(A,)}
    assert {node.machines for node in graph.nodes[4:-1]} == {(B,)}
    edges = edges_of(graph)
    crossing = {ends: edge.bytes for ends, edge in edges.items() if edge.crosses}
    assert crossing == dict.fromkeys(
        [("inputs", "first"), ("first", "right"), ("relu", "add"), ("last", "outputs"), ("first", "outputs")], 32
    )
    assert not edges["first", "left"].crosses
    assert edges["first", "left"].bytes == 0


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
