"""Conversions of ``torch.ops.quantized_decomposed``, which torchao's quantisers of exported programs write.

Their numbers are those of ``torch/ao/quantization/fx/_decomposed.py``, but for quotients instead of products with a
reciprocal: on ties, the result may be one step apart.
"""

import numpy as np
from tvm import relax

from tvm_split.frontends.compositions import limited
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of
from tvm_split.frontends.torch.conversions import TorchCall


def _scales(op: Operators, call: TorchCall, dtype: str) -> tuple[relax.Expr, relax.Expr, int]:
    """Return scales, zero points of ``dtype`` and the axis that they are along; scalars are for all axes."""
    if "scale" in call.attributes:
        return constant(call["scale"], "float32"), constant(call["zero_point"], dtype), -1
    scales, zeros = op.cast(call["scales"], "float32"), call["zero_points"]
    return scales, constant(np.zeros(shape_of(scales)), dtype) if zeros is None else op.cast(zeros, dtype), call["axis"]


def _quantised(op: Operators, call: TorchCall) -> relax.Expr:
    low, high, kinds = call["quant_min"], call["quant_max"], np.iinfo(call.dtype)
    result = op.quantize(call["input"], *_scales(op, call, call.dtype), call.dtype)
    return result if (low, high) == (kinds.min, kinds.max) else limited(op, result, low, high)


def _dequantised(op: Operators, call: TorchCall) -> relax.Expr:
    return op.dequantize(call["input"], *_scales(op, call, dtype_of(call["input"])), call.dtype)


CONVERSIONS: dict[str, Conversion] = {
    f"{name}_per_{part}.default": convert
    for name, convert in (("quantize", _quantised), ("dequantize", _dequantised))
    for part in ("tensor", "channel")
}
"""Conversions by the name of the overload."""
