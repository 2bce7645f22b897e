"""Checks arrays against a program before they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_split.rpc_runtime.errors import InputError
from tvm_split.rpc_runtime.program.interface import Array, Bytes
from tvm_split.rpc_runtime.program.program import Program


def checked_inputs(program: Program, inputs: Sequence[Array]) -> list[Array]:
    """The inputs, row-major.

    Raises:
        InputError: their number, a shape or a dtype is not the program's.
    """
    if isinstance(inputs, np.ndarray) or len(inputs) != len(program.inputs):
        got = "one array" if isinstance(inputs, np.ndarray) else str(len(inputs))
        raise InputError(f"the program takes a sequence of {len(program.inputs)} arrays, got {got}")
    for tensor, array in zip(program.inputs, inputs, strict=True):
        if array.shape != tensor.shape or array.dtype.name != tensor.dtype:
            raise InputError(f"input {tensor} got {array.dtype.name}[{', '.join(map(str, array.shape))}]")
    return [np.asarray(array, order="C") for array in inputs]


def flat_bytes(array: Array) -> Bytes:
    """A row-major array's memory as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)
