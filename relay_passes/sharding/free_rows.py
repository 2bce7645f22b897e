"""Prove that the rows of a batch do not mix: a row of each output depends on the same row of the inputs, and no other.

The proof follows the batch axis from the inputs through the sharding rules, without any machines. Beyond what a shard
may do, no operation may read another row, add up rows, or read a value that differs from row to row and is no input.

    x [4, 8] ─ linear ─ relu ─ softmax along axis 1 ─▶ [4, 8]       each row by itself
    x [4, 8] ─ softmax along axis 0 ─▶ refused: it computes over that axis
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from math import prod

import tvm
from tvm import relax

from relay_passes.fold_constants import fold_remaining
from relay_passes.ir import array_of, is_tensor_constant, main_function, operations_of, returned_fields, shape_of
from relay_passes.sharding import shape_rules
from relay_passes.sharding.propagate import Axes
from relay_passes.sharding.region import ShardError
from relay_passes.sharding.rule import Axis, Operand, Operation, operation_of
from relay_passes.sharding.rules import RULES, rule_of

MOST_TRIES = 64
"""Most sets of inputs that are tried as those with rows."""
MOST_READINGS = 1000
"""Most ways to read the reshapes of a network of one row, in which the batch axis may be any axis of length 1."""


def free_rows(module: tvm.IRModule) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return whether each input has the rows, along its first axis, and along which axis each output has them.

    All inputs with rows have the same number of them; as many inputs as possible have rows.

    Raises:
        ShardError: an operation mixes rows, or an output has none; names it.
    """
    function = main_function(fold_remaining(module))
    first: ShardError | None = None
    for chosen in islice(_candidates(function.params), MOST_TRIES):
        try:
            outputs = _outputs_with(function, chosen)
        except ShardError as error:
            first = first or error
        else:
            return tuple(parameter.name in chosen for parameter in function.params), outputs
    raise first or ShardError("no input has an axis")


def _candidates(parameters: Sequence[relax.Var]) -> Iterator[dict[str, int]]:
    """Yield sets of inputs with equal first sizes, largest first, each with that number of rows."""
    rows_of = {parameter.name: shape_of(parameter)[0] for parameter in parameters if shape_of(parameter)}
    for rows in dict.fromkeys(rows_of.values()):
        same = [name for name, size in rows_of.items() if size == rows]
        for count in range(len(same), 0, -1):
            yield from (dict.fromkeys(names, rows) for names in combinations(same, count))


def _outputs_with(function: relax.Function, chosen: Mapping[str, int]) -> tuple[int, ...]:
    """Return the axis of the rows in each output, if these inputs have rows; raise a `ShardError` as `free_rows`."""
    rows = next(iter(chosen.values()))
    operations = [replace(operation_of(binding, "rows of a batch"), hint="") for binding in operations_of(function)]
    readings: list[tuple[int, dict[str, Axes]]] = [(0, {name: (Axis(0, 1, rows),) for name in chosen})]
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
                    axes[whole.name], *others = _results(operation, rows)
                    readings += [(place + 1, {**axes, whole.name: other}) for other in reversed(others)]
                place += 1
            return tuple(_axis_of_output(*field, axes, rows) for field in enumerate(returned_fields(function)))
        except ShardError as error:
            errors.setdefault(place, error)
    raise errors[max(errors)]


def _results(operation: Operation, rows: int) -> list[Axes]:
    """Return where the rows may be in the results of an operation, the likeliest first."""
    rule = RULES.get(operation.operator)
    if rule is shape_rules.reshape:
        results = _regrouped(operation, rows)
    else:
        passed = rule_of(operation)
        if passed.reduced or passed.needs is not None or (passed.blocks or 0) % rows:
            raise operation.refused("a row of its result needs other rows")
        for operand, axis in zip(operation.operands, passed.operands, strict=True):
            if axis and not operand.axis and not _repeats(operand, axis, rows):
                raise operation.refused("it reads a value that differs from row to row and is not of the batch")
        results = [passed.results]
    if not results:
        raise operation.refused(f"{operation.operands[0].shape} becomes {operation.shape}, which has no such axis")
    return results


def _regrouped(operation: Operation, rows: int) -> list[Axes]:
    """Return where the rows of a reshape's operand may be: an axis of their own, or merged with its neighbours."""
    axis, source, target = operation.only_first(), operation.operands[0].shape, operation.shape
    before = prod(source[: axis.index]) * axis.outer
    axes = []
    for index, size in enumerate(target):
        outside = prod(target[:index])
        if outside <= before <= outside * size and not before % outside and not size % (before // outside):
            result = Axis(index, before // outside, size // (before // outside))
            axes += [result] * (result.length % rows == 0)
    return [(axis,) for axis in sorted(axes, key=lambda axis: (axis.outer, axis.length) != (1, rows))]


def _axis_of_output(number: int, field: relax.Expr, axes: Mapping[str, Axes], rows: int) -> int:
    (axis,) = axes.get(getattr(field, "name", ""), (None,))
    if axis is None:
        raise ShardError(f"output {number} does not depend on them")
    if (axis.outer, axis.length) != (1, rows):
        raise ShardError(f"output {number} of the shape {shape_of(field)} has no axis of {rows}")
    return axis.index


def _repeats(operand: Operand, axis: Axis, rows: int) -> bool:
    """Return whether a value that is not of the batch is the same for each row."""
    if rows == 1 or not is_tensor_constant(operand.expression):
        return rows == 1
    blocks = array_of(operand.expression).reshape(prod(operand.shape[: axis.index]) * axis.outer, rows, -1)
    return all(block[:1].tobytes() * rows == block.tobytes() for block in blocks)
