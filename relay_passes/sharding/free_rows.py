"""Prove that the rows of a batch do not mix: a row of each output depends on the same row of the inputs, and no other.

The proof follows the batch axis through the sharding rules. Beyond what a shard may do, no operation may need another
row, add up rows, or read a value that differs from row to row and is no input.
"""

from dataclasses import replace
from itertools import combinations, islice
from math import prod
from typing import Any

import tvm
from tvm import relax

from relay_passes.fold_constants import fold_remaining
from relay_passes.ir import array_of, is_tensor_constant, main_function, operations_of, returned_fields, shape_of
from relay_passes.sharding import shape_rules
from relay_passes.sharding.propagate import Axes
from relay_passes.sharding.region import ShardError
from relay_passes.sharding.rule import Axis, Operand, Operation, operation_of
from relay_passes.sharding.rules import RULES, rule_of

MOST_SETS, MOST_READINGS = 64, 1000
"""Most sets of inputs that are tried as those with rows; and for each, most readings of the reshapes."""


def free_rows(module: tvm.IRModule) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return whether each input has the rows, along its first axis, and along which axis each output has them.

    All inputs with rows have the same number of them; as many inputs as possible have rows.

    Raises:
        ShardError: an operation mixes rows, or an output has none; names it.
    """
    function = main_function(fold_remaining(module))
    for binding in operations_of(function):
        if not isinstance(binding.var.ty, relax.TensorType | relax.TupleType):  # a shape that is computed
            raise ShardError(f"{binding.var.name!r} computes no tensor, but a {type(binding.var.ty).__name__}")
    sizes = {parameter.name: shape_of(parameter)[0] for parameter in function.params if shape_of(parameter)}
    alike = [[name for name in sizes if sizes[name] == rows] for rows in dict.fromkeys(sizes.values())]
    sets = (
        chosen for names in alike for left in range(len(names)) for chosen in combinations(names, len(names) - left)
    )
    first: ShardError | None = None
    for names in islice(sets, MOST_SETS):
        try:
            outputs = _outputs_with(function, names, sizes[names[0]])
            return tuple(parameter.name in names for parameter in function.params), outputs
        except ShardError as error:
            first = first or error
    raise first or ShardError("no input has an axis")


def _outputs_with(function: relax.Function, names: tuple[str, ...], rows: int) -> tuple[int, ...]:
    """Return the axis of the rows in each output, if these inputs have rows; raise a `ShardError` as `free_rows`."""
    operations = [replace(operation_of(binding, "rows of a batch"), hint="") for binding in operations_of(function)]
    readings: list[tuple[int, dict[Any, Axes]]] = [(0, {name: (Axis(0, 1, rows),) for name in names})]
    errors: dict[int, ShardError] = {}
    for _ in range(MOST_READINGS):
        if not readings:
            break
        place, axes = readings.pop()
        try:
            while place < len(operations):
                whole = operations[place]
                operation = whole.with_axes([axes.get(name) for name in whole.names])
                if any(axis for operand in operation.operands for axis in operand.axes):
                    # Equal reshapes are read alike: the layers of a network repeat.
                    source = operation.operands[0]
                    key = operation.operator, source.axis, source.shape, operation.shape
                    result, *others = [axes[key]] if key in axes else _results(operation, rows)
                    readings += [(place + 1, {**axes, whole.name: other, key: other}) for other in reversed(others)]
                    axes |= {whole.name: result, key: result} if others else {whole.name: result}
                place += 1
            fields = returned_fields(function)
            results = [(field, *axes.get(getattr(field, "name", ""), (None,))) for field in fields]
            for number, (field, axis) in enumerate(results):
                if axis is None or (axis.outer, axis.length) != (1, rows):
                    raise ShardError(f"output {number} of the shape {shape_of(field)} has no axis of these {rows}")
            return tuple(axis.index for _, axis in results)
        except ShardError as error:
            errors.setdefault(place, error)
    raise errors[max(errors)]


def _results(operation: Operation, rows: int) -> list[Axes]:
    """Return where the rows may be in the results of an operation, the likeliest first."""
    if RULES.get(operation.operator) is shape_rules.reshape:
        return _regrouped(operation, rows)
    rule = rule_of(operation)
    if rule.reduced or rule.needs is not None or (rule.blocks or 0) % rows:
        raise operation.refused("a row of its result needs other rows")
    for operand, axis in zip(operation.operands, rule.operands, strict=True):
        if axis and not operand.axis and not _repeats(operand, axis, rows):
            raise operation.refused("it reads a value that differs from row to row and is not of the batch")
    return [rule.results]


def _regrouped(operation: Operation, rows: int) -> list[Axes]:
    """Return where the rows of a reshape's operand may be: an axis of their own, or merged with its neighbours.

    A single row may be any axis of length 1 with as many elements before it.
    """
    axis, source, target = operation.only_first(), operation.operands[0].shape, operation.shape
    before, axes = prod(source[: axis.index]) * axis.outer, []
    for index, size in enumerate(target):
        outer, rest = divmod(before, prod(target[:index]))
        if not rest and 0 < outer <= size and not size % outer and not size // outer % rows:
            axes.append(Axis(index, outer, size // outer))
    if not axes:
        raise operation.refused(f"{source} becomes {target}, which has no such axis")
    return [(axis,) for axis in sorted(axes, key=lambda axis: (axis.outer, axis.length) != (1, rows))]


def _repeats(operand: Operand, axis: Axis, rows: int) -> bool:
    """Return whether a value that is not of the batch is the same for each row."""
    if rows == 1 or not is_tensor_constant(operand.expression):
        return rows == 1
    blocks = array_of(operand.expression).reshape(prod(operand.shape[: axis.index]) * axis.outer, rows, -1)
    return all(block[:1].tobytes() * rows == block.tobytes() for block in blocks)
