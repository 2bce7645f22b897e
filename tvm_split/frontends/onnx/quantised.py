"""Conversions of operators on quantised tensors: dequantise the inputs, compute in float32, quantise the result.

ONNX defines its own in this way. Those of ``com.microsoft`` are defined in docs/ContribOperators.md of onnxruntime,
whose quantiser writes both ("QOperator").
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.convert import Conversion
from tvm_split.frontends.onnx.conversions import OnnxCall
from tvm_split.frontends.onnx.microsoft import by_onnx, operands_of
from tvm_split.frontends.operators import Operators, constant, dtype_of, shape_of

Values = Sequence[relax.Expr]
FloatConversion = Callable[[Operators, OnnxCall, Values], relax.Expr]
"""A conversion of a call with its inputs in float32."""


def _per_axis(op: Operators, numbers: relax.Expr) -> relax.Expr:
    """Return scales or zero points; one number, which may be an array, as a scalar."""
    return op.reshape(numbers, []) if shape_of(numbers) == [1] else numbers


def _dequantised(op: Operators, quantised: Sequence[Any], axis: int) -> relax.Expr:
    """Return the values of a tensor, given with its scale and zero point; several ones of both are along ``axis``."""
    value, scale, zero = quantised
    zero = constant(0, dtype_of(value)) if zero is None else _per_axis(op, zero)
    return op.dequantize(value, _per_axis(op, scale), zero, axis, "float32")


def _quantised(op: Operators, value: relax.Expr, scale: relax.Expr, zero: relax.Expr | None) -> relax.Expr:
    zero = constant(0, "uint8") if zero is None else _per_axis(op, zero)
    if shape_of(scale) not in ([], [1]):
        raise ModelImportError("its result has several scales; one for the whole result can be imported")
    return op.quantize(value, _per_axis(op, scale), zero, -1, dtype_of(zero))


def _bias(op: Operators, bias: relax.Expr | None, *scales: relax.Expr) -> relax.Expr | None:
    """Return the values of an int32 bias, whose scale is the product of those of both factors."""
    if bias is None:
        return None
    return op.multiply(op.cast(bias, "float32"), op.multiply(*(_per_axis(op, scale) for scale in scales)))


def _factors(call: OnnxCall, count: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return data and weights, each with its scale and zero point, and the remaining ones of ``count`` operands."""
    operands = operands_of(call, count)
    return operands[:3], operands[3:6], operands[6:]


def _values(op: Operators, operands: Sequence[Any]) -> Values:
    """Return the values of tensors, each given before its scale and zero point."""
    return [_dequantised(op, operands[place : place + 3], -1) for place in range(0, len(operands), 3)]


def _each(op: Operators, call: OnnxCall, convert: FloatConversion, count: int = 1) -> relax.Expr:
    """Convert a call of ``count`` inputs, each before its scale and zero point; those of the result follow."""
    *inputs, scale, zero = operands_of(call, 3 * count + 2)
    return _quantised(op, convert(op, call, _values(op, inputs)), scale, zero)


def _convolution(op: Operators, call: OnnxCall) -> relax.Expr:
    data, weight, (scale, zero, bias) = _factors(call, 9)
    factors = [_dequantised(op, data, 1), _dequantised(op, weight, 0)]
    return _quantised(op, by_onnx(op, call, "Conv", [*factors, _bias(op, bias, data[1], weight[1])]), scale, zero)


def _matmul(op: Operators, call: OnnxCall) -> relax.Expr:
    data, weight, (scale, zero) = _factors(call, 8)
    left = _dequantised(op, data, max(len(shape_of(data[0])) - 2, 0))  # its scales are those of rows
    return _quantised(op, op.matmul(left, _dequantised(op, weight, -1)), scale, zero)


def _gemm(op: Operators, call: OnnxCall) -> relax.Expr:
    data, weight, (bias, scale, zero) = _factors(call, 9)
    axis = 0 if call.get("transB", 0) else 1
    factors = [_dequantised(op, data, -1), _dequantised(op, weight, axis)]
    added = _bias(op, bias, op.multiply(data[1], call.get("alpha", 1.0)), weight[1])
    result = by_onnx(op, call, "Gemm", [*factors, added], beta=1.0)
    return result if scale is None else _quantised(op, result, scale, zero)


def _integer_convolution(op: Operators, call: OnnxCall) -> relax.Expr:
    # Missing in TVM. float64 holds all sums of such products exactly.
    data, weight, *zeros = operands_of(call, 4)
    factors = [op.cast(data, "float64"), op.cast(weight, "float64")]
    for place, zero in enumerate(zeros):
        if zero is not None:
            sizes = [-1, *[1] * (len(shape_of(weight)) - 1)] if place else [1]
            factors[place] = op.subtract(factors[place], op.reshape(op.cast(zero, "float64"), sizes))
    return op.cast(by_onnx(op, call, "Conv", factors), "int32")


def _concatenation(op: Operators, call: OnnxCall) -> relax.Expr:
    scale, zero, *inputs = call.operands
    return _quantised(op, op.concat(_values(op, inputs), call["axis"]), scale, zero)


def _choice(op: Operators, call: OnnxCall) -> relax.Expr:
    condition, *inputs, scale, zero = operands_of(call, 9)
    return _quantised(op, op.where(condition, *_values(op, inputs)), scale, zero)


def _named(op: Operators, call: OnnxCall, values: Values, operator: str) -> relax.Expr:
    """Convert to ONNX's ``operator`` with the same attributes."""
    if call.get("channels_last", 0):
        raise ModelImportError("its channels are the last axis; give the file that onnxruntime's quantiser wrote")
    last = len(shape_of(values[0])) - 1
    if operator == "Softmax" and call.get("opset", 13) < 13 and call.get("axis", 1) not in (-1, last):
        raise ModelImportError("it is a softmax over several axes, as below opset 13")
    return by_onnx(op, call, operator, values)


_ACTIVATIONS = ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool")

QUANTISED: dict[str, Conversion] = {
    "QLinearConv": _convolution,
    "QLinearMatMul": _matmul,
    "ConvInteger": _integer_convolution,
    "com.microsoft.QGemm": _gemm,
    "com.microsoft.QLinearAdd": partial(_each, convert=lambda op, call, values: op.add(*values), count=2),
    "com.microsoft.QLinearMul": partial(_each, convert=lambda op, call, values: op.multiply(*values), count=2),
    **{f"com.microsoft.QLinear{name}": partial(_each, convert=partial(_named, operator=name)) for name in _ACTIVATIONS},
    "com.microsoft.QLinearConcat": _concatenation,
    "com.microsoft.QLinearWhere": _choice,
}
"""Conversions by the operator's name, with its domain if that is not ONNX's."""
