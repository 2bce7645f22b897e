"""Fold constants: compute arithmetic and views of constants with numpy, in passes and while a network is imported.

Requires: a normalised function ``main``.
Ensures: calls of the operators below whose operands are all constants have become constants.

TVM's own `FoldConstant` compiles a kernel for every call that it folds, which takes tens of milliseconds. In ResNet-50
the decomposed batch norms alone are about three hundred calls, which took 17 of the 24 seconds of its compilation.
`fold_remaining` folds the operators that are not named here by TVM's pass. That pass lowers every operator of the
network, so it only runs if there is something to fold.
"""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import (
    array_of,
    bindings_of,
    constant,
    is_tensor_constant,
    main_function,
    main_pass,
    operator_name,
    shape_of,
    used_variables,
)

Array = np.ndarray[Any, Any]
_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    **{f"relax.{name}": getattr(np, name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{f"relax.{name}": getattr(np, name) for name in ("negative", "sqrt")},
    "relax.rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
}
_VIEWS = frozenset(
    f"relax.{name}"
    for name in ("reshape", "expand_dims", "squeeze", "flatten", "broadcast_to", "permute_dims", "astype")
)


def _in_order(view: Array) -> Array:
    """Copy a transposed array to row-major order, in strips: numpy's own copy misses the cache at nearly each element.

    A weight of 3072 × 768 takes 3 to 8 ms instead of 50.
    """
    if view.ndim < 2 or view.flags.c_contiguous:
        return np.ascontiguousarray(view)
    result = np.empty(view.shape, view.dtype)
    for start in range(0, view.shape[-1], 64):
        result[..., start : start + 64] = view[..., start : start + 64]
    return result


def _dequantized(call: relax.Call, data: Array, scale: Array, zero_point: Array) -> Array:
    shape = [1] * data.ndim
    if scale.ndim and data.ndim:
        shape[int(call.attrs.axis)] = scale.size
    zero_point = zero_point.astype("int64").reshape(shape if zero_point.ndim else ())
    # The difference is exact, and the product is rounded once.
    whole = (data.astype("int64") - zero_point).astype("float32")
    return np.asarray(whole * (scale.reshape(shape) if scale.ndim else scale))


def _taken(call: relax.Call, data: Array, places: Array) -> Array | None:
    mode = str(call.attrs.mode)
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return None if mode == "nan" else np.take(data, places, axis, mode="wrap" if mode == "wrap" else "clip")


_OTHERS: dict[str, Callable[..., Array | None]] = {
    "relax.flip": lambda call, data: np.ascontiguousarray(np.flip(data, int(call.attrs.axis))),
    "relax.dequantize": _dequantized,
    "relax.take": _taken,
}
MOST_ELEMENTS = 1 << 20
"""Maximum elements of a folded result that is larger than its operands; a larger one is computed where it is used."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@main_pass("FoldConstants")
def fold_constants(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
    """Fold arithmetic and views of constants in the function ``main``."""
    value = folded(expression)
    return None if value is None else constant(value)


@tvm.transform.module_pass(opt_level=0, name="FoldRemaining")  # type: ignore[untyped-decorator]
def fold_remaining(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    """Fold calls of any operator on constants in ``main``, and remove unused values."""
    values = (binding.value for binding in bindings_of(main_function(module)))
    if any(isinstance(value, relax.Call) and not used_variables(value) for value in values):
        module = relax.transform.FoldConstant()(module)
    return relax.transform.DeadCodeElimination(["main"])(module)


def folded(expression: relax.Expr) -> Array | None:
    """Return the value of a call on constants; None if its operator, type or size is not folded here."""
    operator = operator_name(expression)
    if operator not in _ELEMENTWISE and operator not in _VIEWS and operator not in _OTHERS:
        return None
    tensors = [argument for argument in expression.args if isinstance(argument.ty, relax.TensorType)]
    if not isinstance(expression.ty, relax.TensorType) or not all(map(is_tensor_constant, tensors)):
        return None
    arrays: list[Array] = [array_of(tensor) for tensor in tensors]
    shape = shape_of(expression)
    if math.prod(shape) > max(MOST_ELEMENTS, *(array.size for array in arrays)):
        return None
    dtype = np.dtype(str(expression.ty.dtype))
    if operator in _OTHERS:
        return _OTHERS[operator](expression, *arrays)
    if operator == "relax.permute_dims":
        axes = expression.attrs.axes
        return _in_order(arrays[0].transpose(None if axes is None else [int(axis) for axis in axes]))
    if operator == "relax.astype":
        # numpy and C convert a float that does not fit an integer differently; leave that to the compiler.
        return arrays[0].astype(dtype) if dtype.name in _FLOATS else None
    if operator == "relax.broadcast_to":
        return np.ascontiguousarray(np.broadcast_to(arrays[0], shape))
    if operator in _VIEWS:
        return arrays[0].reshape(shape)
    if dtype.name not in _FLOATS:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(_ELEMENTWISE[operator](*arrays), dtype).reshape(shape)
