"""The proof before deployment catches what it is there for, and names the layer."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
import tvm
from hypothesis import given, strategies as st
from onnx import helper, numpy_helper
from torch import nn
from torch.nn import functional

import tvm_split
from tvm_split.compiler.bundle import Verified
from tvm_split.compiler.difference import TOLERANCES, difference, tolerances_of
from tvm_split.errors import CompileWarning


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def test_a_wrong_import_is_named_by_its_layer() -> None:
    model = tvm_split.load_model(network(), (torch.randn(2, 4),))
    text = model.module.script(show_meta=True)
    assert "R.tanh(" in text
    wrong = dataclasses.replace(model, module=tvm.script.from_source(text.replace("R.tanh(", "R.sigmoid(")))
    planned = tvm_split.plan(wrong, tvm_split.Cluster.local(2), stages=2, estimate=True)
    with pytest.raises(tvm_split.VerificationError, match=r"disagree on output .* first layer .* is '3' \(sigmoid\)"):
        tvm_split.compile(wrong, planned)
    tvm_split.compile(wrong, planned, verify=False)


class Chooses(nn.Module):
    """Sorts values of which each has a neighbour that is equal but for rounding."""

    def __init__(self, looks_up: bool) -> None:
        super().__init__()
        self.looks_up = looks_up

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.cat([torch.exp(x), torch.square(torch.exp(x / 2))], 1)
        places = values.argsort(1)
        chosen = places.float() if self.looks_up else places
        return chosen, values.argmax(1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_indices_of_nearly_equal_values_are_no_difference_and_no_fault_of_the_importer() -> None:
    x = torch.linspace(-3, 3, 3000).reshape(3, 1000)
    cluster = tvm_split.Cluster.local(1)
    model = tvm_split.load_model(Chooses(False).eval(), (x,))
    assert model.reference is not None
    tvm_split.compile(model, tvm_split.plan(model, cluster, estimate=True))
    model = tvm_split.load_model(Chooses(True).eval(), (x,))
    with pytest.raises(tvm_split.VerificationError, match=r"'argsort' \(.*indices choose other elements") as error:
        tvm_split.compile(model, tvm_split.plan(model, cluster, estimate=True))
    assert "importer" not in str(error.value)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_equal_values_differ_by_nothing() -> None:
    values = np.array([1.0, np.nan, np.inf, -0.0], np.float32)
    assert difference(values, values.copy()).is_within


def quantised_chain(scale: float = 0.3, size: int = 400) -> onnx.ModelProto:
    """Products of integers whose results all lie on steps or between two: ties that float32's last bit decides.

    Each layer makes several steps of one. The second layer's weights are multiples of ``scale``.
    """
    generator = np.random.default_rng(0)
    scales = {"input": 0.1, "output": 0.06, **{f"weight_{layer}": 0.3 for layer in range(3)}, "weight_1": scale}
    weights = [numpy_helper.from_array(np.float32(value), name) for name, value in scales.items()]
    nodes = []

    def add(kind: str, name: str, *inputs: str) -> str:
        nodes.append(helper.make_node(kind, inputs, [name], name=name))
        return name

    x = add("DequantizeLinear", "x_float", add("QuantizeLinear", "x_steps", "x", "input", "zero"), "input", "zero")
    for layer in range(3):
        values = generator.integers(-1, 2, (size, size)) * (generator.random((size, size)) < 64 / size)
        weights.append(numpy_helper.from_array(values.astype("int8"), f"w{layer}"))
        weight = add("DequantizeLinear", f"w{layer}_float", f"w{layer}", f"weight_{layer}", "zero")
        steps = add("QuantizeLinear", f"steps{layer}", add("MatMul", f"product{layer}", x, weight), "output", "zero")
        x = add("DequantizeLinear", f"float{layer}", steps, "input", "zero")
    weights.append(numpy_helper.from_array(np.int8(0), "zero"))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8, size]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.filterwarnings("ignore::tvm_split.errors.CompileWarning")
def test_a_quantised_network_may_round_ties_otherwise_but_not_more() -> None:
    model = tvm_split.load_model(quantised_chain())
    planned = tvm_split.plan(model, tvm_split.Cluster.in_process(1), estimate=True)
    assert tvm_split.compile(model, planned).verified is Verified.AS_COMPILED
    wrong = dataclasses.replace(tvm_split.load_model(quantised_chain(0.35)), reference=model.reference)
    with pytest.raises(tvm_split.VerificationError, match=r"first layer with other values is 'product1': by \d\d"):
        tvm_split.compile(wrong, planned)


class IllConditioned(nn.Module):
    """Subtracts numbers that are nearly equal, so that float32 has few right digits left."""

    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.slope, self.large = slope, torch.randn(256, 16) * 1e4
        self.less = self.large - torch.randn(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x * self.large).sum(1) - (x * self.less).sum(1) * self.slope)


@pytest.mark.filterwarnings("ignore::tvm_split.errors.CompileWarning")
@pytest.mark.parametrize("framework", ["torch", "onnx"])
def test_an_ill_conditioned_network_may_be_as_far_off_as_its_source(framework: str) -> None:
    x = torch.randn(4, 256, 1, generator=torch.Generator().manual_seed(1))
    models = [tvm_split.load_model(IllConditioned(slope).eval(), (x,)) for slope in (1.0, 1.001)]
    if framework == "onnx":
        models = [tvm_split.load_model(as_onnx(IllConditioned(slope)), (x.numpy(),)) for slope in (1.0, 1.001)]
    planned = tvm_split.plan(models[0], tvm_split.Cluster.in_process(1), estimate=True)
    tvm_split.compile(models[0], planned)
    wrong = dataclasses.replace(models[1], reference=models[0].reference)
    with pytest.raises(tvm_split.VerificationError, match=r"disagree on output"):
        tvm_split.compile(wrong, planned)


def as_onnx(network: IllConditioned) -> onnx.ModelProto:
    weights = {
        "large": network.large.numpy(),
        "less": network.less.numpy(),
        "slope": np.float32(network.slope),
        "axis": np.int64([1]),
    }
    nodes = [
        helper.make_node("Mul", ["x", "large"], ["a"]),
        helper.make_node("Mul", ["x", "less"], ["b"]),
        helper.make_node("ReduceSum", ["a", "axis"], ["p"], keepdims=0),
        helper.make_node("ReduceSum", ["b", "axis"], ["q"], keepdims=0),
        helper.make_node("Mul", ["q", "slope"], ["r"]),
        helper.make_node("Sub", ["p", "r"], ["d"]),
        helper.make_node("Tanh", ["d"], ["y"]),
    ]
    shapes = {"x": [4, 256, 1], "y": [4, 16]}
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    return helper.make_model(helper.make_graph(nodes, "ill", ends[:1], ends[1:], initializers), ir_version=9)


def test_outputs_of_nan_pass_with_a_warning_for_each() -> None:
    class Roots(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.sqrt(x), torch.relu(x)

    model = tvm_split.load_model(Roots().eval(), (torch.tensor([[-1.0, 4.0, -9.0]]),))
    planned = tvm_split.plan(model, tvm_split.Cluster.in_process(1))
    with pytest.warns(CompileWarning) as warned:
        bundle = tvm_split.compile(model, planned)
    assert bundle.verified is Verified.AS_COMPILED
    (warning,) = warned
    assert f"2 of 3 values of output {model.outputs[0].name!r} are NaN" in str(warning.message)


class Clamps(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().clamp(-self.limit, self.limit)


def compiled_as(limit: float, x: torch.Tensor, has_examples: bool = True) -> None:
    """Compile a network that clamps at ``limit``, against a source that does so at 20."""
    right, wrong = (tvm_split.load_model(Clamps(value).eval(), (x,)) for value in (20.0, limit))
    wrong = dataclasses.replace(wrong, reference=right.reference)
    wrong = wrong if has_examples else dataclasses.replace(wrong, example_inputs=None)
    tvm_split.compile(wrong, tvm_split.plan(wrong, tvm_split.Cluster.in_process(1), estimate=True))


def test_a_difference_at_large_values_is_warned_of_each_time() -> None:
    for _ in range(2):
        with pytest.warns(CompileWarning, match=r"unusual values .* output 'output_0' differs from the source: by"):
            compiled_as(25.0, torch.linspace(-1, 1, 64))


def test_8_bit_integers_are_compared_over_their_range() -> None:
    compiled_as(20.0, torch.zeros(2, 4, dtype=torch.uint8), has_examples=False)
    with pytest.raises(tvm_split.VerificationError, match="by 5"):
        compiled_as(25.0, torch.zeros(2, 4, dtype=torch.uint8), has_examples=False)


@pytest.mark.filterwarnings("error::tvm_split.errors.CompileWarning")
def test_right_operators_are_not_warned_of_at_unusual_values() -> None:
    class Operators(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = functional.softplus(x) + torch.erf(x) + torch.sign(x) + functional.gelu(x)
            z = torch.logsumexp(x, -1) + (x == 0).sum(-1) + torch.fmod(x, 0.3).sum(-1)
            return y, z, torch.exp(x), torch.softmax(x, -1), functional.layer_norm(x, (32,)), torch.round(x), 1 / x

    model = tvm_split.load_model(Operators().eval(), (torch.randn(4, 32),))
    tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.in_process(1), estimate=True))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (np.zeros(3, np.float32), np.zeros(4, np.float32)),
        (np.zeros(3, np.float32), np.zeros(3, np.float16)),
        (np.array([1, 2], np.int64), np.array([1, 3], np.int64)),
        (np.array([np.nan], np.float32), np.array([1.0], np.float32)),
        (np.array([1.0], np.float32), np.array([np.nan], np.float32)),
        (np.array([1.0, 1.001], np.float32), np.array([1.0, 1.0], np.float32)),
        (np.array([True]), np.array([False])),
    ],
)
def test_what_differs_is_found(actual: np.ndarray, expected: np.ndarray) -> None:
    assert not difference(actual, expected).is_within


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1), st.floats(-0.9, 0.9))
def test_a_difference_within_the_tolerance_of_the_range_passes(values: list[float], part: float) -> None:
    right = np.array(values, np.float32)
    span = float(np.abs(right).max())
    assert difference((right + np.float32(part * 1e-4 * span)).astype(np.float32), right).is_within or span < 1e-30


class Mixed(nn.Module):
    """Half precision inside, float32 at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64).half(), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x.half()).float())


def test_what_was_half_before_is_compared_as_such() -> None:
    torch.manual_seed(0)
    model = tvm_split.load_model(Mixed().eval(), (torch.randn(4, 64),))
    last = model.module["main"].body.body.fields[0].name
    tolerances = tolerances_of(model.module["main"])
    assert (
        {model.layers[name]: tolerances[name] for name in tolerances}["inner"]
        == tolerances[last]
        == TOLERANCES["float16"]
    )
    exact = tvm_split.load_model(network(), (torch.randn(2, 4),))
    assert set(tolerances_of(exact.module["main"]).values()) == {TOLERANCES["float32"]}
