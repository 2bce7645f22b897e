"""Constant folding: compute operations on known values.

It counts loops, and it takes one layer's slice of weights that are stacked for a loop. Moves of elements are views of
numpy; arithmetic on small tensors is left to StableHLO's own interpreter, and on large ones to the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from tvm_split.frontends.stablehlo.conversions.call import integers, result_kind
from tvm_split.frontends.stablehlo.modules import Array, array_of

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


def folded(operation: ir.Operation, operands: Sequence[Array]) -> list[Array] | None:
    """Return the results of an operation on known operands; None if it is not folded."""
    kind = operation.name
    if kind == "stablehlo.constant":
        return [array_of(operation.attributes["value"])]
    if kind in _MOVING:
        shape, dtype = result_kind(operation)
        return [_MOVING[kind](operation, operands, shape).astype(dtype, copy=False)]
    return _interpreted(operation, operands) if kind in _ARITHMETIC else None


def _interpreted(operation: ir.Operation, operands: Sequence[Array]) -> list[Array] | None:
    """Compute an elementwise operation; None for a large one, or a division that the interpreter cannot survive."""
    compact = [without_repeats(operand) for operand in operands]
    sizes = np.broadcast_shapes(*(operand.shape for operand in compact))
    if math.prod(sizes) > LARGEST:
        return None
    is_division = operation.name in ("stablehlo.divide", "stablehlo.remainder") and compact[1].dtype.kind in "iu"
    if is_division and (compact[1] == 0).any():
        return None

    def kind_of(value: ir.Value) -> ir.Type:
        return ir.RankedTensorType.get(sizes, ir.RankedTensorType(value.type).element_type)

    module = ir.Module.create()
    kinds = [kind_of(operand) for operand in operation.operands]
    results = [kind_of(result) for result in operation.results]
    function = func.FuncOp("main", ir.FunctionType.get(kinds, results), ip=ir.InsertionPoint(module.body))
    block = ir.InsertionPoint(function.add_entry_block())
    attributes = {name: operation.attributes[name] for name in operation.attributes}
    arguments = list(function.arguments)
    copy = ir.Operation.create(operation.name, results, arguments, attributes=attributes, ip=block)
    func.ReturnOp(list(copy.results), ip=block)
    constants = [
        ir.DenseElementsAttr.get(
            np.ascontiguousarray(np.broadcast_to(array, sizes)), type=kind.element_type, shape=list(sizes)
        )
        for array, kind in zip(compact, kinds, strict=True)
    ]
    (value,) = stablehlo.eval_module(module, constants)
    return [np.broadcast_to(array_of(value), result_kind(operation)[0])]


def without_repeats(array: Array) -> Array:
    """Slice an array to size 1 along each axis on which ``numpy.broadcast_to`` only repeated it (stride 0)."""
    place = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)
    return array[place] if array.size else array


def _iota(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    axis = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
    sizes = [shape[axis] if each == axis else 1 for each in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(sizes), shape)


def broadcast_shape(dimensions: Sequence[int], sizes: Sequence[int], rank: int) -> list[int]:
    """The shape of an operand, with size 1 for each axis of the result that it lacks."""
    placed = dict(zip(dimensions, sizes, strict=True))
    return [placed.get(axis, 1) for axis in range(rank)]


def _broadcast(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    (operand,) = operands
    dimensions = integers(operation, "broadcast_dimensions")
    axes = sorted(range(operand.ndim), key=lambda axis: dimensions[axis])
    moved = without_repeats(operand).transpose(axes)
    sizes = broadcast_shape([dimensions[axis] for axis in axes], moved.shape, len(shape))
    return np.broadcast_to(moved.reshape(sizes), shape)


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


def _dynamic_update(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    operand, update, *starts = operands
    result = np.array(operand)
    result[_starts(operand, starts, update.shape)] = update
    return result


def _bits(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    return np.array(operands[0]).view(result_kind(operation)[1]).reshape(shape)


def _slice(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    firsts, lasts, steps = (integers(operation, name) for name in ("start_indices", "limit_indices", "strides"))
    return operands[0][tuple(map(slice, firsts, lasts, steps))]


def _reverse(operation: ir.Operation, operands: Sequence[Array], shape: tuple[int, ...]) -> Array:
    return np.flip(operands[0], tuple(integers(operation, "dimensions")))


_MOVING: dict[str, Callable[[ir.Operation, Sequence[Array], tuple[int, ...]], Array]] = {
    "stablehlo.iota": _iota,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": lambda operation, operands, shape: operands[0].transpose(integers(operation, "permutation")),
    "stablehlo.slice": _slice,
    "stablehlo.reverse": _reverse,
    "stablehlo.concatenate": lambda operation, operands, shape: np.concatenate(
        operands, ir.IntegerAttr(operation.attributes["dimension"]).value
    ),
    "stablehlo.dynamic_slice": lambda operation, operands, shape: operands[0][
        _starts(operands[0], operands[1:], integers(operation, "slice_sizes"))
    ],
    "stablehlo.dynamic_update_slice": _dynamic_update,
    "stablehlo.bitcast_convert": _bits,
}
