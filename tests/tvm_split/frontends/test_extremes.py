"""Elementwise functions at the ends of each dtype's range, from torch and ONNX; expected is torch in float64.

Results below the smallest normal number may be zero. Arrays of 96 numbers and more are computed in vectors.
"""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional as F

from tests.helpers.frontends.comparison import run_as_stage
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model

Function = Callable[[torch.Tensor], torch.Tensor]

TORCH: dict[str, tuple[Function, float]] = {
    **{
        name: (getattr(torch, name), 8)
        for name in (
            *[
                "abs",
                "acos",
                "acosh",
                "asin",
                "asinh",
                "atan",
                "atanh",
                "ceil",
                "cos",
                "cosh",
                "erf",
                "erfc",
                "exp",
                "expm1",
                "floor",
                "log",
                "log10",
                "log1p",
                "log2",
                "neg",
            ],
            *[
                "reciprocal",
                "round",
                "rsqrt",
                "sigmoid",
                "sign",
                "sin",
                "sinh",
                "sqrt",
                "square",
                "tan",
                "tanh",
                "trunc",
                "nan_to_num",
            ],
        )
    },
    # exp(x · ln 2) multiplies the rounding of the product; in half precision, computed in float32, it is gone.
    "exp2": (torch.exp2, 200),
    "elu": (F.elu, 8),
    "selu": (F.selu, 8),
    "relu": (F.relu, 0),
    "silu": (F.silu, 8),
}
"""Functions, and the largest error in units of the last digit."""
ONNX = {
    **{
        name: (getattr(torch, name.lower()), 8)
        for name in (
            *[
                "Abs",
                "Acos",
                "Acosh",
                "Asin",
                "Asinh",
                "Atan",
                "Atanh",
                "Ceil",
                "Cos",
                "Cosh",
                "Erf",
                "Exp",
                "Floor",
                "Log",
                "Neg",
                "Reciprocal",
            ],
            *["Round", "Sigmoid", "Sin", "Sinh", "Sqrt", "Tan", "Tanh"],
        )
    },
    **{name: (getattr(F, name.lower()), 8) for name in ("Celu", "Elu")},
    # ONNX's defaults are numbers of float32.
    "Selu": (lambda x: F.elu(x, np.float32(1.6732632).item()) * np.float32(1.050701).item(), 8),
    "Relu": (F.relu, 0),
    "Sign": (lambda x: torch.where(x.isnan(), x, torch.sign(x)), 0),
    "IsNaN": (torch.isnan, 0),
    "IsInf": (torch.isinf, 0),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    special = [0.0, 1e-20, 1e-7, 1e-3, limits.tiny, limits.max, limits.max / 2, float("inf"), float("nan"), 1.0, 0.5]
    positive = torch.cat([torch.tensor(special, dtype=torch.float64), torch.linspace(0.1, 12, 53).double()])
    return torch.cat([positive, -positive]).to(dtype)


def in_numpy(value: torch.Tensor) -> np.ndarray:
    return value.view(torch.uint16).numpy().view("bfloat16") if value.dtype == torch.bfloat16 else value.numpy()


def as_float64(value: np.ndarray) -> np.ndarray:
    return value.astype("float32" if value.dtype.name == "bfloat16" else value.dtype).astype("float64")


def compare(names: dict[str, tuple[Function, float]], x: torch.Tensor, results: list[np.ndarray]) -> None:
    limits = torch.finfo(x.dtype)
    faults = []
    for (name, (function, digits)), result in zip(names.items(), results, strict=True):
        with warnings.catch_warnings(action="ignore"):
            # What depends on the largest number of the dtype is computed in it.
            exact = (function(x) if name == "nan_to_num" else function(x.double())).double().numpy()
            expected = torch.from_numpy(exact).to(x.dtype).double().numpy()
            actual = as_float64(result)
            allowed = (digits if x.dtype.itemsize > 2 else min(digits, 1)) * limits.eps * np.abs(
                expected
            ) + 4 * limits.tiny
            same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
            # A result just below the largest number may be rounded to infinity, and the reverse.
            near = np.abs(actual - exact) <= allowed
        wrong = ~(same | near)
        if wrong.any():
            faults.append(
                f"{name} of {x[torch.from_numpy(wrong)][:4].tolist()}: {actual[wrong][:4]}, not {expected[wrong][:4]}"
            )
    assert not faults, "\n".join(faults)


class All(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for function, _ in TORCH.values()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_of_torch(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    model = load_model(All(), (x,))
    compare(TORCH, x, list(run_as_stage(model, [in_numpy(x)])))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_functions_of_onnx(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
    nodes = [helper.make_node(name, ["x"], [name], name=name) for name in ONNX]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name.startswith("Is") else kind, x.shape)
        for name in ONNX
    ]
    graph = helper.make_graph(nodes, "all", [helper.make_tensor_value_info("x", kind, x.shape)], outputs)
    model = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    compare(ONNX, x, list(run_as_stage(model, [x.numpy()])))


INTEGERS = torch.arange(-48, 48)
OTHERS: dict[str, tuple[Callable[..., object], list[torch.Tensor]]] = {
    "unsigned": (lambda x: (-x, torch.sign(x), x - 1, torch.abs(x)), [torch.arange(96, dtype=torch.uint8)]),
    "booleans": (lambda x: (torch.isnan(x), torch.sign(x)), [torch.arange(96) % 3 == 0]),
    "angles": (lambda x: (torch.atan2(x, x - 3), torch.copysign(x, -x)), [INTEGERS]),
    "signs": (torch.copysign, [torch.ones(4), torch.tensor([0.0, -0.0, -torch.inf, torch.inf])]),
    "norm": (lambda x: F.layer_norm(x, [8]), [torch.randn(12, 8).double()]),
    "classes": (
        lambda x: (torch.isnan(x), torch.isinf(x), torch.isfinite(x)),
        [torch.tensor([float("nan"), float("inf"), 1.0]).bfloat16().repeat(32)],
    ),
    "wrapping": (
        lambda x, y: (torch.maximum(x, y) - torch.minimum(x, y), (x + 1) > x, x * 1000 // 1000),
        [torch.tensor([2**63 - 1, -(2**63), 2**63 - 6, 12345]), torch.tensor([-5, 7, -(2**63), -9])],
    ),
    "powers": (
        lambda x: (x**39, x**100, x.int() ** 25, x.to(torch.uint8) ** 9),
        [torch.tensor([3, 7, -3, 10, 2, -1, 1, 0])],
    ),
    "quotients": (
        torch.floor_divide,
        [
            torch.tensor([1.0, 2, 3, 6, 5, -5, 7, -7, 0, torch.inf, 1]),
            torch.tensor([0.1, 0.1, 0.1, 0.1, -torch.inf, torch.inf, 2, 2, 3, 2, 0]),
        ],
    ),
    "lengths": (
        torch.hypot,
        [
            torch.tensor([3.0, 1e30, 1e-30, 0, torch.inf, 1, 2e-38]),
            torch.tensor([4.0, 1e30, 1e-30, 0, torch.nan, torch.nan, 0]),
        ],
    ),
    "half lengths": (torch.hypot, [torch.tensor([300.0, 1000]).half(), torch.tensor([300.0, 0]).half()]),
    "integers": (
        lambda x, flags: [
            getattr(torch, name)(value)
            for name in ("acosh", "asinh", "atan", "atanh", "acos", "asin", "cosh", "sinh", "tan", "exp2", "log1p")
            for value in (x, x.to(torch.uint8), flags)
        ],
        [torch.arange(4), torch.tensor([True, False])],
    ),
    "scalars": (
        lambda x: [
            result
            for axis in (0, -1)
            for reduced in (
                *(x.sum(axis), x.mean(axis), x.prod(axis), x.amax(axis, keepdim=True), x.std(axis, correction=0)),
                *(x.argmin(axis), x.all(axis), torch.count_nonzero(x, axis), x.logsumexp(axis), x.softmax(axis)),
                *(x.max(axis), x.sort(axis), x.median(axis), x.topk(1, axis), x.cumsum(axis)),
                x.index_select(axis, torch.tensor([0])),
            )
            for result in (reduced if isinstance(reduced, tuple) else [reduced])
        ],
        [torch.tensor(3.0)],
    ),
    "deviations": (
        lambda x: (x.std(), x.std(0, correction=0), x.std([0, 1], keepdim=True)),
        [torch.tensor([[1e20, 2e20], [-1e30, 1e-3]])],
    ),
    "half images": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        [(torch.arange(30) * 37 % 61 / 7 - 4).half().reshape(1, 1, 5, 6)],
    ),
    "one part": (lambda x: x.split(5), [torch.arange(4)]),
    "group norm": (lambda x, w: F.group_norm(x, 2, w, -w), [torch.randn(2, 4, 3).double(), torch.randn(4).double()]),
    "scattered booleans": (
        lambda x, index, source: (
            x.index_add(0, index, source),
            x.scatter(0, index, source),
            *(x.scatter_reduce(0, index, source, reduce) for reduce in ("amax", "amin", "prod", "sum")),
        ),
        [torch.tensor([True, False, True, False]), torch.tensor([3, 1, 3, 0]), torch.arange(4) != 2],
    ),
    "pool": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-torch.inf), 2), [torch.randn(1, 2, 3, 3)]),
}
"""Functions of other dtypes and several operands; torch's own results are expected."""


class Called(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_of_torch(name: str) -> None:
    function, inputs = OTHERS[name]
    expected = function(*inputs)
    actual = run_as_stage(load_model(Called(function), tuple(inputs)), [in_numpy(value) for value in inputs])
    for result, value in zip(actual, [expected] if isinstance(expected, torch.Tensor) else expected, strict=True):
        assert (result.dtype, result.shape) == (value.numpy().dtype, value.shape)
        np.testing.assert_allclose(result, value.numpy(), rtol=1e-6, atol=1e-6 * value.is_floating_point())


def test_small_tails_of_the_normal_distribution_keep_their_digits() -> None:
    x = torch.linspace(-12, 6, 96)
    (actual,) = run_as_stage(load_model(Called(torch.special.ndtr), (x,)), [x.numpy()])
    np.testing.assert_allclose(actual, torch.special.erfc(-x.double() / 2**0.5) / 2, rtol=1e-5)


def test_interpolation_between_integers_is_refused() -> None:
    x = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    with pytest.raises(ModelImportError, match="interpolates between numbers of uint8; convert them to float32"):
        load_model(Called(lambda x: F.interpolate(x, size=(12, 5), mode="bilinear")), (x,))

    def nearest(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(12, 5), mode="nearest")

    (actual,) = run_as_stage(load_model(Called(nearest), (x,)), [x.numpy()])
    np.testing.assert_array_equal(actual, nearest(x).numpy())
