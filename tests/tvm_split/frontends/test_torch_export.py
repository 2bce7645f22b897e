"""Functions and methods of torch, and what torch.export or an importer refuses: the line, the dtype, what to do."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.frontends.comparison import assert_equal_to_source, run_as_stage
from tests.helpers.frontends.torch_case import Function, Group
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))

    def probabilities(self, x: Any) -> Any:
        return self(x).softmax(-1)


class Pipeline:
    def __init__(self) -> None:
        self.net, self.last = Net().eval(), nn.Linear(2, 2)

    def scores(self, x: Any) -> Any:
        return self.last(self.net(x))


net = Net().eval()
X = torch.randn(3, 4)


def scaled(x: Any, factor: Any = 2) -> Any:
    return torch.relu(x) * factor


def below_net(x: Any) -> Any:
    return net(x + 1)


@pytest.mark.parametrize(
    ("function", "layers"),
    [
        (net.probabilities, ("body.0", "body.1", "head", "softmax")),
        (below_net, ("add", "body.0", "body.1", "head")),
        (lambda x, own=net: below_net(x) + own.head.bias, None),
        (Pipeline().scores, ("net.body.0", "net.body.1", "net.head", "last")),
        (scaled, ("relu", "mul")),
        (functools.partial(scaled, factor=3), ("relu", "mul")),
        (functools.partial(net), ("body.0", "body.1", "head")),
    ],
    ids=["method", "global", "nested", "object", "function", "partial", "partial module"],
)
def test_functions_and_methods_have_the_layers_of_their_modules(
    function: Callable[..., Any], layers: tuple[str, ...] | None
) -> None:
    model = load_model(function, (X,))
    assert layers in (None, model.layer_names)
    assert_equal_to_source(model)


def test_a_compiled_module_has_its_layers() -> None:
    test_functions_and_methods_have_the_layers_of_their_modules(torch.compile(net), ("body.0", "body.1", "head"))


def test_a_method_takes_arrays_and_names_its_model() -> None:
    model = load_model(net.probabilities, (np.ones((3, 4), np.float32),))
    assert (model.name, model.framework) == ("Net_probabilities", "torch")


@pytest.mark.parametrize("function", [scaled, net.probabilities])
def test_a_function_needs_example_inputs(function: Callable[..., Any]) -> None:
    with pytest.raises(ModelImportError, match=rf"{function.__name__} is a function: give example_inputs"):
        load_model(function)


def branch(x: Any) -> Any:
    return x + 1 if x.sum() > 0 else x - 1


def steps(x: Any) -> Any:
    for _ in range(int(x.max())):
        x = x + 1
    return x


def by_numpy(x: Any) -> Any:
    return torch.from_numpy(np.tanh(x.numpy()))


def wrong_sizes(x: Any) -> Any:
    return x @ torch.ones(5, 2)


def returned_object(x: Any) -> Any:
    return x * 2, Pipeline()


class Rows(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[torch.nonzero(x[:, 0] > 0)[:, 0]]


class Masked(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x > 0]


class Counts(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.bincount(x[0].long()) + 1


class Noise(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.rand(4, generator=torch.Generator())


@pytest.mark.parametrize(
    ("source", "line", "remedy"),
    [
        (branch, "x.sum() > 0", "torch.where"),
        (steps, "range(int(x.max()))", "fixed sizes"),
        (by_numpy, "x.numpy()", "other operations of torch"),
        (wrong_sizes, "torch.ones(5, 2)", r"wrong_sizes for inputs float32\[3, 4\].*give example_inputs"),
        (returned_object, "", "use_cache=False"),
        (Rows, "torch.nonzero", "nonzero.default.*the part of the model before or after"),
        (Masked, "x[x > 0]", "torch.where"),
        (Counts, "torch.bincount", "bincount.default .the shape of its result depends on the values"),
        (Noise, "torch.rand", "rand.generator .its result is random"),
    ],
)
def test_what_is_refused_is_shown_with_its_line_and_a_remedy(
    source: Callable[..., Any], line: str, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelImportError, match=remedy) as caught:
        load_model(source() if isinstance(source, type) else source, X)
    if line:
        text, first = inspect.getsourcelines(source)
        number = first + next(place for place, code in enumerate(text) if line in code)
        assert re.search(rf"{re.escape(__file__)}, line {number}\b", str(caught.value))
    assert len(str(caught.value)) < 600
    assert "torch" not in capfd.readouterr().err


class Weights(nn.Module):
    """A function of x and a tensor, which is a buffer or a parameter ``w``."""

    def __init__(self, tensor: Any, function: Callable[..., Any], is_parameter: bool = False) -> None:
        super().__init__()
        if is_parameter:
            self.w = nn.Parameter(tensor, requires_grad=False)
        else:
            self.register_buffer("w", tensor)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x, self.w)


ANGLES = torch.polar(torch.ones(3, 2), torch.randn(3, 2))
FLOAT8 = torch.randn(4, 5).to(torch.float8_e4m3fn)


def rotated(x: Any, w: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * w.real - odd * w.imag, even * w.imag + odd * w.real], -1).flatten(-2)


@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
def test_weights_of_rare_dtypes_are_computed_on_import(is_parameter: bool) -> None:
    functions = {
        rotated: ANGLES,
        (lambda x, w: x[:, :2] * torch.view_as_real(w)[..., 1] + w.abs()): ANGLES,
        (lambda x, w: x @ w.to(torch.float32)): FLOAT8,
        (lambda x, w: x @ (w.float() * 0.5)): FLOAT8.float().to(torch.float8_e5m2),
    }
    parts = [Weights(tensor, function, is_parameter) for function, tensor in functions.items()]
    model = load_model(Group(parts).eval(), tuple((X,) for _ in parts))
    assert_equal_to_source(model, computed=run_as_stage)


@pytest.mark.parametrize(
    ("network", "x", "message"),
    [
        (
            Weights(ANGLES, lambda x, w: (x[:, :2] * w).abs()),
            X,
            r"layer 'mul' reads 'w', which has the dtype complex64.*real",
        ),
        (Function(lambda x: torch.fft.rfft(x).abs()), X, r"_fft_r2c.*complex64.*in fft_rfft"),
        (Function(torch.abs), torch.ones(2, dtype=torch.complex64), "input .* has the dtype complex64"),
        (Function(lambda x: x.float()), FLOAT8, "input .* has the dtype float8_e4m3fn"),
        (Function(lambda x: x.to(torch.float8_e5m2).float()), X, "float8_e5m2.*float32"),
        (Weights(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), lambda x, w: x), X, "layer 'Weights' has 'w' of q"),
    ],
)
def test_dtypes_that_cannot_be_imported_are_named_with_what_holds_them(network: Any, x: Any, message: str) -> None:
    with pytest.raises(ModelImportError, match=message):
        load_model(network.eval(), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, X)], ids=["script", "trace"])
def test_torchscript_is_refused_by_name(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ModelImportError, match="TorchScript"):
        load_model(make(nn.Sequential(nn.Linear(4, 4)).eval()), (X,))


def test_layers_that_torch_ao_quantized_are_named() -> None:
    quantized = torch.ao.quantization.quantize_dynamic(Net().eval(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ModelImportError, match=r"layer 'body.0' has 'weight' of qint8.*ONNX or TFLite"):
        load_model(quantized, X)
