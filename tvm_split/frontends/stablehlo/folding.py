"""Constant folding: compute operations on known values.

It counts loops, and it takes one layer's slice of weights that are stacked for a loop. Moves of elements are views of
numpy; arithmetic on small tensors is left to StableHLO's own interpreter, and on large ones to the passes.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from rpc_runtime.program.specs import Array
from tvm_split.frontends.stablehlo.modules import array_of, integers, result_kind

LARGEST = 1 << 16
"""The most elements of a computed result; repeated elements count once. The interpreter takes 2 µs for each."""

_ARITHMETIC = frozenset(
    f"stablehlo.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "remainder", "maximum", "minimum", "power", "negate", "abs", "sign",
        "sqrt", "rsqrt", "exponential", "log", "tanh", "sine", "cosine", "floor", "ceil", "and", "or", "xor", "not",
        "select", "clamp", "convert", "compare", "shift_left", "shift_right_logical", "shift_right_arithmetic",
    )
)  # fmt: skip


_INTERPRETED = frozenset(("stablehlo.reverse", "stablehlo.dynamic_update_slice", "stablehlo.bitcast_convert"))


def folded(operation: ir.Operation, operands: Sequence[Array]) -> list[Array] | None:
    """Return the results of an operation on known operands; None if it is not folded."""
    kind = operation.name
    if kind == "stablehlo.constant":
        return [array_of(operation.attributes["value"])]
    if kind not in _MOVING and kind not in _ARITHMETIC and kind not in _INTERPRETED:
        return None
    shape, dtype = result_kind(operation)
    if kind in _MOVING:
        return [_MOVING[kind](operation, operands, shape).astype(dtype, copy=False)]
    if kind in _INTERPRETED:
        return _interpreted(operation, operands, shape)
    compact = [without_repeats(operand) for operand in operands]
    # The interpreter ends the process where it divides an integer by 0.
    if (
        kind in ("stablehlo.divide", "stablehlo.remainder")
        and compact[1].dtype.kind in "iu"
        and (compact[1] == 0).any()
    ):
        return None
    sizes = np.broadcast_shapes(*(operand.shape for operand in compact))
    values = _interpreted(operation, [np.broadcast_to(operand, sizes) for operand in compact], sizes)
    return values and [np.broadcast_to(value, shape) for value in values]


def _interpreted(operation: ir.Operation, operands: Sequence[Array], sizes: Sequence[int]) -> list[Array] | None:
    """Compute an operation with StableHLO's interpreter; None if its result of shape ``sizes`` exceeds `LARGEST`."""
    if math.prod(sizes) > LARGEST:
        return None

    def kind_of(value: ir.Value, shape: Sequence[int]) -> ir.Type:
        return ir.RankedTensorType.get(list(shape), ir.RankedTensorType(value.type).element_type)

    kinds = [kind_of(value, array.shape) for value, array in zip(operation.operands, operands, strict=True)]
    result = kind_of(operation.results[0], sizes)
    module = ir.Module.create()
    function = func.FuncOp("main", ir.FunctionType.get(kinds, [result]), ip=ir.InsertionPoint(module.body))
    block = ir.InsertionPoint(function.add_entry_block())
    attributes = {name: operation.attributes[name] for name in operation.attributes}
    copy = ir.Operation.create(operation.name, [result], list(function.arguments), attributes=attributes, ip=block)
    func.ReturnOp(list(copy.results), ip=block)
    constants = [
        ir.DenseElementsAttr.get(np.ascontiguousarray(array), type=kind.element_type, shape=list(array.shape))
        for array, kind in zip(operands, kinds, strict=True)
    ]
    return [array_of(value) for value in stablehlo.eval_module(module, constants)]


def without_repeats(array: Array) -> Array:
    """Slice an array to size 1 along each axis on which ``numpy.broadcast_to`` only repeated it (stride 0)."""
    place = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)
    return array[place] if array.size else array


def _iota(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    axis = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
    sizes = [shape[axis] if position == axis else 1 for position in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(sizes), shape)


def _broadcast(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    (operand,) = operands
    dimensions = integers(operation, "broadcast_dimensions")
    moved = without_repeats(operand).transpose(np.argsort(dimensions))
    sizes = dict(zip(sorted(dimensions), moved.shape, strict=True))
    return np.broadcast_to(moved.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _reshape(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    (operand,) = operands
    if operand.size > 1 and without_repeats(operand).size == 1:
        return np.broadcast_to(without_repeats(operand).reshape([1] * len(shape)), shape)
    return operand.reshape(shape)


def _starts(operand: Array, starts: Sequence[Array], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The bounds of a dynamic slice; its starts are clamped so that it lies inside the operand."""
    places = [
        min(max(int(start), 0), whole - size) for start, whole, size in zip(starts, operand.shape, sizes, strict=True)
    ]
    return tuple(slice(place, place + size) for place, size in zip(places, sizes, strict=True))


def _slice(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    firsts, lasts, steps = (integers(operation, name) for name in ("start_indices", "limit_indices", "strides"))
    return operands[0][tuple(map(slice, firsts, lasts, steps))]


_MOVING: dict[str, Callable[[ir.Operation, Sequence[Array], tuple[int, ...]], Array]] = {
    "stablehlo.iota": _iota,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": lambda operation, operands, shape: operands[0].transpose(integers(operation, "permutation")),
    "stablehlo.slice": _slice,
    "stablehlo.concatenate": lambda operation, operands, shape: np.concatenate(
        operands, ir.IntegerAttr(operation.attributes["dimension"]).value
    ),
    "stablehlo.dynamic_slice": lambda operation, operands, shape: operands[0][
        _starts(operands[0], operands[1:], integers(operation, "slice_sizes"))
    ],
    "stablehlo.real": lambda operation, operands, shape: operands[0].real,
    "stablehlo.imag": lambda operation, operands, shape: operands[0].imag,
}
