"""Half precision is accumulated in float32, by whichever importer: expected is the same network in float32.

In float16 a sum of ones ends at 2048, in bfloat16 at 256, and the square of 300 is infinite in float16.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import defs

from tests.helpers.frontends.comparison import assert_close, run_as_stage
from tests.helpers.frontends.onnx_cases import i64, merged, node_model, random
from tvm_split.frontends import load_model

OPSET = 23
LARGE = np.abs(random(2, 4, 16, 16)) * 60
MANY = 1 + random(2, 4096) / 100
FEW = np.abs(random(2, 4096)) / 2
WEIGHTS = [np.float32([1, 2, 0.5, 1.5]), np.float32([0, 1, 2, 3])]
STATISTICS = [*WEIGHTS, np.float32([50, 40, 60, 50]), np.float32([1000, 2000, 1500, 900])]

ONNX: list[tuple[str, np.ndarray, dict[str, Any]]] = [
    *((f"Reduce{kind}", LARGE / 8, {"constants": [i64(2, 3)]}) for kind in ("Mean", "L1", "L2")),
    ("ReduceMean", LARGE, {"constants": [i64(0, 1, 2, 3)]}),
    *((f"Reduce{kind}", MANY, {"constants": [i64(1)]}) for kind in ("Sum", "Prod", "LogSum", "SumSquare", "LogSumExp")),
    ("CumSum", MANY, {"constants": [i64(1)]}),
    *((operator, LARGE, {}) for operator in ("GlobalAveragePool", "MeanVarianceNormalization")),
    *((operator, LARGE, {"kernel_shape": [16, 16]}) for operator in ("AveragePool", "LpPool")),
    *(("LpNormalization", LARGE, {"axis": 3, "p": order}) for order in (1, 2)),
    ("InstanceNormalization", LARGE, {"constants": WEIGHTS}),
    ("GroupNormalization", LARGE, {"constants": WEIGHTS, "num_groups": 2}),
    ("LayerNormalization", LARGE, {"constants": [LARGE[0, 0, 0]]}),
    ("RMSNormalization", LARGE, {"constants": [LARGE[0, 0, 0] / 8]}),
    ("BatchNormalization", LARGE, {"constants": STATISTICS}),
    ("LRN", LARGE, {"size": 3}),
    *((operator, MANY, {}) for operator in ("Softmax", "LogSoftmax")),
    *((operator, LARGE, {}) for operator in ("Softplus", "Gelu", "Mish", "Elu", "Selu", "HardSwish", "Softsign")),
    ("Einsum", MANY, {"equation": "ij->i"}),
    ("Resize", FEW, {"constants": [None, None, i64(2, 8)], "mode": "linear", "antialias": 1}),
    ("MatMul", FEW, {"constants": [np.ones((4096, 3), np.float32)]}),
    ("Gemm", FEW, {"constants": [np.ones((4096, 3), np.float32)]}),
    ("Conv", FEW.reshape(2, 16, 256), {"constants": [np.ones((3, 16, 256), np.float32)]}),
    ("Conv", FEW.reshape(2, 2, 2048), {"constants": [np.ones((4, 1, 2048), np.float32)], "group": 2}),
    ("Conv", FEW.reshape(2, 16, 4, 8, 8), {"constants": [np.ones((3, 16, 4, 8, 8), np.float32)]}),
    ("ConvTranspose", FEW.reshape(2, 4096, 1, 1, 1), {"constants": [np.ones((4096, 1, 1, 1, 2), np.float32)]}),
]  # fmt: skip


def in_dtype(array: Any, dtype: str) -> Any:
    return array.astype(dtype) if isinstance(array, np.ndarray) and array.dtype == np.float32 else array


def node_in_dtype(operator: str, data: np.ndarray, options: dict[str, Any], dtype: str) -> onnx.ModelProto:
    constants = [in_dtype(array, dtype) for array in options.get("constants", [])]
    return node_model(operator, [data.astype(dtype)], **{**options, "constants": constants, "opset": OPSET})


def assert_close_to_float32(names: Sequence[str], halves: Sequence[np.ndarray], wholes: Sequence[np.ndarray]) -> None:
    for name, half, whole in zip(names, halves, wholes, strict=True):
        assert np.isfinite(whole).all()
        try:
            assert_close(half, whole.astype(half.dtype))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_onnx_accumulates_in_float32(dtype: str) -> None:
    cases = [case for case in ONNX if f"tensor({dtype})" in defs.get_schema(case[0], OPSET).inputs[0].types]
    inputs = [data.astype(dtype) for _, data, _ in cases]
    widened = [data.astype("float32") for data in inputs]
    half, whole = (merged([node_in_dtype(*case, kind) for case in cases]) for kind in (dtype, "float32"))
    reference = load_model(whole, widened).reference
    assert reference is not None
    halves = run_as_stage(load_model(half, inputs), inputs)
    assert_close_to_float32(
        [f"{operator} {place}" for place, (operator, *_) in enumerate(cases)], halves, reference.outputs(widened)
    )


TORCH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda many, _: many.sum(-1),
    "mean": lambda many, _: (many * 60).mean(-1),
    "prod": lambda many, _: many.prod(-1),
    "cumsum": lambda many, _: many.cumsum(-1),
    "logsumexp": lambda many, _: many.logsumexp(-1),
    "softmax": lambda many, _: many.softmax(-1),
    "norm": lambda _, large: large.norm(dim=-1),
    "norm of order 3": lambda _, large: large.norm(p=3, dim=-1),
    "deviation": lambda _, large: large.std(-1),
    "normalize": lambda _, large: F.normalize(large, dim=-1),
    "layer norm": lambda _, large: F.layer_norm(large, large.shape[-1:]),
    "RMS norm": lambda _, large: F.rms_norm(large, large.shape[-1:]),
    "group norm": lambda _, large: F.group_norm(large, 2),
    "instance norm": lambda _, large: F.instance_norm(large),
    "average pool": lambda _, large: F.avg_pool2d(large, 16),
    "adaptive pool": lambda _, large: F.adaptive_avg_pool2d(large, 3),
    "cosine similarity": lambda _, large: F.cosine_similarity(large, large[:1], dim=-1),
    "product": lambda many, _: many @ many.T,
    "einsum": lambda many, _: torch.einsum("ij,kj->ik", many, many),
    "attention": lambda _, large: F.scaled_dot_product_attention(large / 60, large / 60, large),
    "conv1d": lambda many, _: F.conv1d(many[None], many[:, None].transpose(0, 1)),
    "conv2d": lambda many, _: F.conv2d(many.reshape(1, 2, 64, 64), many.reshape(1, 2, 64, 64)),
    "depthwise": lambda many, _: F.conv2d(many.reshape(1, 2, 64, 64), many.reshape(2, 1, 64, 64), groups=2),
    "conv3d": lambda many, _: F.conv3d(many.reshape(1, 2, 16, 16, 16), many.reshape(1, 2, 16, 16, 16)),
    "transposed": lambda many, _: F.conv_transpose3d(many.reshape(1, 8192, 1, 1, 1), many.reshape(8192, 1, 1, 1, 1)),
}


class Everything(torch.nn.Module):
    def forward(self, many: torch.Tensor, large: torch.Tensor) -> list[torch.Tensor]:
        return [computed(many, large) for computed in TORCH.values()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_accumulates_in_float32(dtype: torch.dtype) -> None:
    inputs = [torch.from_numpy(array).to(dtype) for array in (MANY, LARGE)]
    model = load_model(Everything().eval(), tuple(inputs))
    wholes = Everything()(*(tensor.float() for tensor in inputs))
    halves = run_as_stage(model, model.example_inputs or ())
    assert_close_to_float32([*TORCH], halves, [tensor.numpy() for tensor in wholes])


class Numbers(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 1e-8, x / 70000, x * 1e5, x - 1e-9, x.sum() / (320 * 320), x**-2, x // 0.7, x ** (1 / 3), x > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beside_half_precision_are_as_wide_as_in_torch(dtype: torch.dtype) -> None:
    x = torch.linspace(0.1, 60000, 96).to(dtype)
    expected = Numbers()(x)
    actual = run_as_stage(load_model(Numbers(), (x,)), [x.view(torch.uint16).numpy().view(np_dtype(dtype))])
    for got, wanted in zip(actual, expected, strict=True):
        # One unit of the last digit: 2^-10 of a number in float16, 2^-7 in bfloat16; subnormals have fewer digits.
        unit = torch.finfo(dtype).eps
        np.testing.assert_allclose(got.astype("float64"), wanted.double().numpy(), rtol=unit, atol=6e-8)


def np_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))
