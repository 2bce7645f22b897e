"""Inputs of any number of rows: cut into micro-batches of the compiled size, whose results are joined."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rpc_runtime.errors import InputError
from rpc_runtime.program.inputs import checked_inputs, shape_of
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import Array, TensorSpec
from tvm_split.compiler.rows import Rows


class Batch:
    """Inputs for a network with inputs ``expected``: an iterable of micro-batches, whose results `join` takes in order.

    ``rows`` is their number of rows; 0 are one micro-batch, whose result has none. The last micro-batch repeats its
    last row if it is not full: that causes no NaN, infinities or subnormal numbers which are not there already.

    Raises:
        InputError: the inputs do not fit, have different numbers of rows, or have rows that cannot be cut.
    """

    def __init__(self, expected: Sequence[TensorSpec], rows: Rows, inputs: Sequence[Any]) -> None:
        self._has_rows, self._axes = rows.inputs or (False,) * len(expected), rows.outputs
        specs = list(map(_resized, expected, inputs)) if len(inputs) == len(expected) else expected
        for spec, resized, has_rows in zip(expected, specs, self._has_rows, strict=True):
            if resized != spec and not has_rows:
                why = rows.mixed or "this input has no rows of the batch"
                raise InputError(
                    f"input {resized} was given, and the network was compiled for {spec}, whose rows cannot be cut: "
                    f"{why}. Give {spec.shape[0]} rows, or load the model with this size"
                )
        self.inputs = checked_inputs(specs, inputs)
        counts = {spec.name: spec.shape[0] for spec, has_rows in zip(specs, self._has_rows, strict=True) if has_rows}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise InputError(f"the inputs have different numbers of rows: {listed}")
        self._size = next((spec.shape[0] for spec in expected if spec.name in counts), 1)
        self.rows = next(iter(counts.values()), 1)
        self.is_whole = self.rows == self._size
        self.micro_batches = max(1, -(-self.rows // self._size))
        self._joined: list[Array] = []
        self._done = 0

    def part(self, index: int) -> tuple[Array, ...]:
        """Return the inputs with the rows of one micro-batch; the last may have fewer."""
        part = slice(index * self._size, (index + 1) * self._size)
        return tuple(array[part] if has else array for array, has in zip(self.inputs, self._has_rows, strict=True))

    def __iter__(self) -> Iterator[tuple[Array, ...]]:
        for index in range(self.micro_batches):
            part = zip(self.part(index), self._has_rows, strict=True)
            yield tuple(_filled(array, self._size) if has_rows else array for array, has_rows in part)

    def join(self, outputs: Outputs) -> Outputs | None:
        """Take the result of the next micro-batch; return that of all rows if it was the last."""
        if self.is_whole:
            return outputs
        end = min(self._done + self._size, self.rows)
        for place, (array, axis) in enumerate(zip(outputs, self._axes, strict=True)):
            if not self._done:
                self._joined.append(np.empty((*array.shape[:axis], self.rows, *array.shape[axis + 1 :]), array.dtype))
            rows = np.moveaxis(self._joined[place], axis, 0)[self._done : end]
            rows[...] = np.moveaxis(array, axis, 0)[: len(rows)]
        self._done = end
        return Outputs(self._joined, outputs.names) if end == self.rows else None


def _filled(part: Array, size: int) -> Array:
    if not len(part):
        return np.zeros((size, *part.shape[1:]), part.dtype)
    return part if len(part) == size else np.concatenate([part, part[-1:].repeat(size - len(part), 0)])


def _resized(spec: TensorSpec, value: Any) -> TensorSpec:
    """Return the specification with the value's number of rows, if the value differs in nothing else."""
    shape = shape_of(value)
    differs = shape[:1] != spec.shape[:1] and shape[1:] == spec.shape[1:] and len(shape) == len(spec.shape)
    return replace(spec, shape=shape) if differs else spec
