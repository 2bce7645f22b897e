"""The edges between pieces are exactly the transfers of a split program."""

import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import tvm_split
from rpc_runtime.program.routes import CLIENT
from tests.models import torch_models
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.targets import host_target
from tvm_split.placement.graph import piece_edges, pieces_of
from tvm_split.planning.sharding.estimates import transfers_of
from tvm_split.profiling.kernels import target_code

MACHINES = ("machine-a", "machine-b", "machine-c")
Moved = dict[tuple[str, str, str], int]


class Branches(nn.Module):
    """Two inputs, of which one is used twice; a value of two tensors; four outputs, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = torch.relu(self.first(x))
        first_half, second_half = torch.chunk(self.second(first + y), 2, dim=1)
        left, right = self.left(first_half), self.right(second_half)
        last = self.last(torch.sigmoid(left) + right + y[:, :4])
        return last, left, first, left


MODELS = {
    "residual": (torch_models.resnet, (torch.zeros(1, 3, 32, 32),)),
    "two inputs": (torch_models.bert, (torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64))),
    "many outputs": (Branches, (torch.zeros(2, 8), torch.zeros(2, 8))),
}


@pytest.mark.parametrize("name", MODELS)
def test_edges_are_the_routes(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = tvm_split.load_model(build().eval(), inputs)
    graph = model.graph
    pieces = pieces_of(graph, [call.kernel.layers for call in target_code(model, host_target(1), None).calls])
    edges = piece_edges(graph, pieces)
    assert len(pieces) > 3
    chance = random.Random(0)
    for _ in range(3):
        machine_of = {piece[0]: chance.choice(MACHINES) for piece in pieces}
        moved: Moved = {}
        home = {**machine_of, CLIENT: CLIENT}
        for edge in edges:
            source, destination = home[edge.source], home[edge.destination]
            if source != destination and edge.tensor is not None:
                moved[edge.tensor, source, destination] = int(edge.bytes)
        assert routes(model, {layer: machine_of[piece[0]] for piece in pieces for layer in piece}) == moved


def routes(model: tvm_split.Model, machine_of: Mapping[str, str]) -> Moved:
    """Return the transfers of the module that is cut from the model with these layers on these machines."""
    used = [machine for machine in MACHINES if machine in machine_of.values()]
    split = {machine: [layer for layer, home in machine_of.items() if home == machine] for machine in used}
    plan = tvm_split.plan(model, tvm_split.Cluster.local(len(MACHINES)), split=split)
    home = {stage.name: stage.machine for stage in plan.stages} | {CLIENT: CLIENT}
    moved: Moved = {}
    for transfer in transfers_of(partition(model, plan)):
        source, destination = home[transfer.source], home[transfer.targets[0] if transfer.targets else CLIENT]
        if source != destination:
            moved[transfer.tensor, source, destination] = int(transfer.bytes)
    return moved
