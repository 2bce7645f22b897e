"""Graphs other than chains, on worker processes, compared with torch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from tests.models.torch_graphs import (
    Constants,
    OnlyConstants,
    Scalars,
    SeveralOutputs,
    Skip,
    Swap,
    TwoConsumers,
    TwoInputs,
)

Split = dict[str, list[str]]
GENERATOR = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def on(*layers: str) -> Split:
    """Return a split: the names of layers for machine-a, machine-b and machine-c, separated by blanks."""
    return {f"machine-{letter}": names.split() for letter, names in zip("abc", layers, strict=False) if names}


IMAGES, ROWS, PAIRS = (_random(1, 3, 9, 9),), (_random(2, 4),), (_random(2, 6),)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], Split]] = {
    "skip over a stage": (Skip, IMAGES, on("first", "middle", "add")),
    "one machine, two stages": (Skip, IMAGES, on("first add", "middle")),
    "two consumers on two machines": (TwoConsumers, PAIRS, on("stem", "left", "right")),
    "two consumers on one machine": (TwoConsumers, PAIRS, on("stem right", "left", "join")),
    "inputs at different stages": (
        TwoInputs,
        (_random(2, 5), torch.tensor([3, 10]), _random(3)),
        on("image", "words mul", "head"),
    ),
    "outputs from different stages": (SeveralOutputs, ROWS, on("first", "second", "third")),
    "scalars": (Scalars, (_random(3, 4), _random()), on("first", "mul_1", "sum_1")),
    "constants beside layers": (Constants, ROWS, on("first", "second", "output_0 output_3")),
    "constants alone": (OnlyConstants, ROWS, on("output_0", "output_1")),
    "a constant on one machine": (OnlyConstants, ROWS, on("", "output_0")),
    "an input that nothing changes": (nn.Identity, ROWS, on("", "output_0")),
    "dropout in evaluation": (nn.Dropout, ROWS, on("output_0")),
    "a scalar that nothing changes": (nn.Identity, (_random(),), on("output_0")),
    "inputs in another order": (Swap, (_random(2, 4), _random()), on("output_0", "output_1 output_2")),
}
TWO_STAGES_ON_ONE = {"one machine, two stages": "aba", "two consumers on one machine": "abac"}
"""The letters of the stages' machines; in other cases each machine has one stage."""


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_torch(name: str, three_workers: tvm_split.Cluster) -> None:
    network, inputs, split = CASES[name]
    module = network().eval()
    model = tvm_split.load_model(module, inputs)
    # Compiling runs it in this process, too, and compares.
    bundle = tvm_split.compile(model, tvm_split.plan(model, three_workers, split=split))
    with tvm_split.deploy(bundle, three_workers) as deployment:
        letters = TWO_STAGES_ON_ONE.get(name, "".join(machine[-1] for machine in split))
        assert [stage.machine for stage in deployment.stages] == [f"machine-{letter}" for letter in letters]
        batches = [tuple(tensor + index for tensor in inputs) for index in range(5)]
        batches = [
            tuple(tensor if tensor.is_floating_point() else inputs[i] for i, tensor in enumerate(batch))
            for batch in batches
        ]
        for batch, outputs in zip(batches, deployment.stream(batches), strict=True):
            with torch.no_grad():
                expected = module(*batch)
            expected = expected if isinstance(expected, tuple) else (expected,)
            assert len(outputs) == len(expected)
            for output, right in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(output, right.numpy(), rtol=1e-5, atol=1e-5)
                assert output.dtype == right.numpy().dtype
