"""Well-known networks at full size on one, two and three workers, compared with their source framework."""

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import tvm_split
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.models import torch_models
from tests.models.onnx_models import light_model

LIMIT = 1e-4


@pytest.mark.parametrize(
    ("name", "workers", "split"),
    [
        pytest.param(
            "resnet50",
            3,
            {"machine-a": ["conv1"], "machine-b": ["layer2"], "machine-c": ["layer4"]},
            marks=pytest.mark.long,
        ),
        pytest.param("resnet50", 2, None, marks=pytest.mark.long),
        pytest.param("light_resnet50", 2, None, marks=pytest.mark.long),
        pytest.param("light_vgg19", 2, {"machine-a": ["n0"], "machine-b": ["n14"]}, marks=pytest.mark.long),
        pytest.param("light_vgg19", 3, None, marks=pytest.mark.long),
        pytest.param("light_squeezenet", 1, None, marks=pytest.mark.slow),
        pytest.param(
            "light_squeezenet",
            3,
            {"machine-a": ["n0"], "machine-b": ["n15"], "machine-c": ["n40"]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_those_of_the_source(
    name: str, workers: int, split: dict[str, list[str]] | None, three_workers: tvm_split.Cluster
) -> None:
    if name == "resnet50":
        model = tvm_split.load_model(torch_models.resnet50(seed=1), (torch.zeros(1, 3, 224, 224),), name=name)
    else:
        model = tvm_split.load_model(light_model(name), name=name)
    planned = tvm_split.plan(model, three_workers, split=split, stages=workers, estimate=True)
    generator = np.random.default_rng(7)
    batches = [
        tuple(generator.standard_normal(spec.shape).astype(spec.dtype) for spec in model.inputs) for _ in range(3)
    ]
    bundle = tvm_split.compile(model, planned)
    assert bundle.verified == "yes"
    with tvm_split.deploy(bundle, three_workers) as deployment:
        assert len(deployment.stages) == workers
        for batch, outputs in zip(batches, deployment.stream(batches), strict=True):
            for output, right in zip(outputs, model.reference.outputs(batch), strict=True):
                assert np.abs(output - right).max() < LIMIT * np.ptp(right)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name not in ("gpt2", "mobilenet") else name
        for name in sorted(torch_models.small_models())
    ],
)
def test_small_relatives_of_known_networks(name: str, three_workers: tvm_split.Cluster) -> None:
    module, inputs = torch_models.small_models()[name]
    model = tvm_split.load_model(module, inputs)
    assert_keeps_contract(model)
    bundle = tvm_split.compile(model, tvm_split.plan(model, three_workers, stages=3, estimate=True))
    with tvm_split.deploy(bundle, three_workers) as deployment:
        assert len(deployment.stages) == 3
        outputs = deployment.run(*inputs)
    with torch.no_grad():
        expected = module(*inputs)
    for output, right in zip(outputs, tree_leaves(expected), strict=True):
        assert np.abs(output - right.numpy()).max() < LIMIT * np.ptp(right.numpy())


class Sorted(torch.nn.Module):
    """A network that calls a function of TVM's runtime library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = torch.sort(self.first(x), dim=-1)
        return values, places, *torch.topk(self.second(values), 3), torch.argsort(values, dim=0)


def test_workers_sort(three_workers: tvm_split.Cluster) -> None:
    """Workers have only TVM's runtime; the check before deployment has all of TVM."""
    torch.manual_seed(0)
    network, x = Sorted().eval(), torch.randn(5, 6)
    split = {"machine-a": ["first"], "machine-b": ["second"]}
    with tvm_split.compile_and_deploy(network, (x,), three_workers, split=split) as deployment:
        for output, right in zip(deployment.run(x), network(x), strict=True):
            np.testing.assert_allclose(output, right.detach().numpy(), rtol=1e-4, atol=1e-5)
