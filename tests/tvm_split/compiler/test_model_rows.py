"""Whether the rows of a batch are independent: by the rules of the operators, and by the source at a second size."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import tvm_split
from tvm_split.compiler.model_rows import rows_of


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Recurrent(nn.Module):
    """Two layers with their states, which have the rows along the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(5, 6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        values, (state, _) = self.steps(x)
        return values, state


def encoder(depth: int = 1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).eval()


def loaded(network: nn.Module, *shapes: tuple[int, ...]) -> tvm_split.Model:
    return tvm_split.load_model(network.eval(), tuple(torch.randn(shape) for shape in shapes))


def images() -> nn.Module:
    norm, pool = nn.BatchNorm2d(8), nn.MaxPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(128, 5))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("network", "shape", "axes"),
    [
        (images(), (3, 8, 8), (0,)),
        (encoder(), (6, 16), (0,)),
        (Function(lambda x: (x @ x.mT).softmax(-1).flatten(1)), (4, 6), (0,)),
        (Function(lambda x: (x.reshape(-1, 6) @ torch.ones(6, 2)).reshape(-1, 4, 2).transpose(0, 1)), (4, 6), (1,)),
        (Function(lambda x: (x - x.mean(1, keepdim=True), x.amax((1, 2)))), (4, 6), (0, 0)),
        (Function(lambda x: torch.stack([x[:, 0], x[:, 1] * torch.arange(6)])), (4, 6), (1,)),
    ],
)
def test_rows_that_only_pass(network: nn.Module, shape: tuple[int, ...], axes: tuple[int, ...], rows: int) -> None:
    found = rows_of(loaded(network, (rows, *shape)))
    assert (found.inputs, found.outputs, found.mixed) == ((True,), axes, "")


def test_one_row_of_many_layers() -> None:
    """Each layer has views in which the row may be any axis of length 1."""
    assert not rows_of(loaded(encoder(20), (1, 6, 16))).mixed


def test_rows_between_other_axes() -> None:
    found = rows_of(loaded(Recurrent(), (3, 4, 5)))
    assert (found.outputs, found.mixed) == ((0, 1), "")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.softmax(0), ["relax.nn.softmax", "computes over that axis"]),
        (lambda x: x - x.mean(0), ["relax.mean", "other rows"]),
        (lambda x: x.cumsum(0), ["relax.cumsum"]),
        (lambda x: x @ x.T, ["relax.matmul"]),
        (lambda x: x + x.flip(0), ["relax.flip"]),
        (lambda x: x.reshape(2, -1), ["relax.reshape", "(3, 4) becomes (2, 6)"]),
        (lambda x: x + torch.arange(3)[:, None], ["relax.add", "differs from row to row"]),
        (lambda x: x[:2], ["relax.strided_slice"]),
        (lambda x: (x, x.sum()), ["relax.sum"]),
        (lambda x: (x, torch.ones(3, 2)), ["output 1", "(3, 2)"]),
        (lambda x: x.flatten(), ["output 0", "(12,)"]),
        (nn.BatchNorm1d(4, track_running_stats=False), ["'function'", "relax.mean"]),
        (nn.Conv1d(3, 3, 1, groups=3), ["'function'", "relax.nn.conv1d"]),  # the rows are its channels
    ],
)
def test_rows_that_mix(function: Callable[..., Any], words: list[str]) -> None:
    found = rows_of(loaded(Function(function), (3, 4)))
    assert all(word in found.mixed for word in words), found.mixed


def test_a_table_beside_the_batch_has_no_rows() -> None:
    for table in ((4, 4), (6, 4)):
        network = Function(lambda x, table: (x @ table.T, 2 * x))
        assert rows_of(loaded(network, (4, 4), table)).inputs == (True, False)
    both = rows_of(loaded(Function(lambda x, y: x + y), (4, 4), (4, 4)))
    assert both.inputs == (True, True)
    assert rows_of(loaded(Function(lambda x, y: x @ y.T + y.T @ x), (4, 4), (4, 4))).mixed


@pytest.mark.parametrize(("scales", "mixes"), [([], False), ([2], True), ([4], False)])
def test_scales_of_rows_are_not_of_the_batch(scales: list[int], mixes: bool) -> None:
    constants = [
        numpy_helper.from_array(np.ones(scales, np.float32) * 0.1, "scale"),
        numpy_helper.from_array(np.zeros(scales, np.uint8), "zero"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], axis=0 if scales == [2] else 1),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], axis=0 if scales == [2] else 1),
    ]
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "rounded", tensors[:1], tensors[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert ("relax.quantize" in rows_of(tvm_split.load_model(model)).mixed) == mixes


def compiled(model: tvm_split.Model, *, verify: bool = True) -> tvm_split.Bundle:
    plan = tvm_split.plan(model, tvm_split.Cluster.in_process(1), estimate=True)
    return tvm_split.compile(model, plan, verify=verify)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_source_that_depends_on_the_number_of_rows(rows: int) -> None:
    """Its graph for one size shows a number only."""
    model = loaded(Function(lambda x: x / x.shape[0]), (rows, 4))
    assert "other sizes" in compiled(model).rows.mixed
    assert not compiled(model, verify=False).rows.mixed


@pytest.mark.parametrize("divides", [True, False])
def test_an_onnx_file_with_open_rows_is_run_at_a_second_size(divides: bool) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], end=1),
        helper.make_node("Cast", ["size"], ["rows"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Div" if divides else "Relu", ["x", "rows"] if divides else ["x"], ["y"]),
    ]
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "open", tensors[:1], tensors[1:])
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    bundle = compiled(tvm_split.load_model(source, batch=1))
    assert bundle.verified == "yes"
    assert bool(bundle.rows.mixed) == divides


def test_a_bundle_keeps_what_was_proved(tmp_path: Any) -> None:
    bundle = compiled(loaded(nn.Linear(4, 2), (2, 4)))
    bundle.save(tmp_path)
    assert tvm_split.Bundle.load(tmp_path).rows == bundle.rows
    assert json.loads((tmp_path / "manifest.json").read_text())["rows"]["outputs"] == [0]
