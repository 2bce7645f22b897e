"""Convert sorting by one key, and the selection of the k largest elements."""

from __future__ import annotations

import math
from typing import Any

from jaxlib.mlir import ir
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.operators import Operators, dtype_of, is_float, wide
from tvm_split.frontends.stablehlo.attributes import comparison, integer
from tvm_split.frontends.stablehlo.conversions.call import Call, Conversions


def _sort(op: Operators, call: Call) -> list[relax.Expr]:
    axis = integer(call.operation, "dimension", -1) % max(len(call.shape), 1)
    key, is_descending = _key(call.operation.regions[0].blocks[0])
    where = op.argsort(_sortable(op, call[key]), axis, is_descending, dtype="int64")
    return [op.gather_elements(call[place], where, axis) for place in range(len(call.operands))]


def _sortable(op: Operators, key: relax.Expr) -> relax.Expr:
    """Cast keys to a dtype that TVM sorts correctly: it sorts bfloat16 wrongly, and small integers not at all.

    NaN becomes infinity: it is the greatest in JAX's order and has no defined position in TVM's.
    """
    dtype = dtype_of(key)
    if not is_float(dtype):
        return op.cast(key, "int32" if dtype in ("bool", "int8", "uint8", "int16", "uint16") else dtype)
    numbers = op.cast(key, wide(dtype))
    return op.where(op.isnan(numbers), math.inf, numbers)


def _key(block: Any) -> tuple[int, bool]:
    """Return the position of the operand that is the sort key, and whether the order is descending.

    JAX converts floats to integer bits, or normalises zeros and NaNs, before it compares: the last comparison counts.
    """
    *body, end = [each.operation for each in block.operations]
    compared = [each for each in body if each.name == "stablehlo.compare" and comparison(each)[0] in "GL"]
    arguments = list(block.arguments)
    for operation in compared:
        if list(end.operands) == list(operation.results):
            left, right = (_arguments_of(operand, arguments) for operand in operation.operands)
            if len(left) == len(right) == 1 and {left[0] // 2} == {right[0] // 2}:
                return left[0] // 2, (comparison(operation)[0] == "G") == (left[0] % 2 == 0)
    raise ModelImportError("it sorts in an order of its own; sorting by one tensor's numbers can be imported")


def _arguments_of(value: ir.Value, arguments: list[ir.Value]) -> list[int]:
    """The positions of the arguments that a value is computed from."""
    if value in arguments:
        return [arguments.index(value)]
    operation = value.owner
    if not isinstance(operation, ir.Block):
        found = {place for operand in operation.operands for place in _arguments_of(operand, arguments)}
        return sorted(found)
    return []


def _top_k(op: Operators, call: Call) -> list[relax.Expr]:
    attributes = call.operation.attributes
    options = ir.DictAttr(attributes["composite_attributes"]) if "composite_attributes" in attributes else attributes
    count = ir.IntegerAttr(options["k"]).value
    data, axis = call[0], len(call.shape) - 1
    where = op.topk(_sortable(op, data), count, axis, "indices", True, "int32")
    return [op.gather_elements(data, op.cast(where, "int64"), axis), where]


CONVERSIONS: Conversions = {"stablehlo.sort": _sort, "chlo.top_k": _top_k}
