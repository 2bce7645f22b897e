"""Convert a user's inputs to the arrays that a program takes."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from rpc_runtime.errors import InputError
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import Array, Bytes, TensorSpec

MAXIMUM_AXES = 64
"""Maximum number of axes of a numpy array."""


def checked_inputs(expected: Sequence[TensorSpec], inputs: Sequence[Any]) -> tuple[Array, ...]:
    """Return the inputs as row-major arrays; they may be numpy or torch arrays, or anything that numpy converts.

    The dtype must be the expected one. Python numbers, and lists of them, have no dtype. They get the input's dtype if
    it can hold them: a float is rounded, a whole number must be exact.

    Raises:
        InputError: the number of inputs, a shape or a dtype is not the expected one; the message has both values.
    """
    if isinstance(inputs, np.ndarray) or len(inputs) != len(expected):
        got = "one array was" if isinstance(inputs, np.ndarray) else f"{len(inputs)} were"
        raise InputError(f"the model's inputs are {', '.join(map(str, expected))}; {got} given")
    return tuple(
        _checked(position, spec, value) for position, (spec, value) in enumerate(zip(expected, inputs, strict=True))
    )


def client_arrays(program: Program, inputs: Sequence[Array]) -> list[Array]:
    """Return a micro-batch's values of the program's ``client_tensors``: the inputs, and copies of its input slices."""
    return [*inputs, *(inputs[index][where].copy() for index, where in program.slice_indices)]


def _checked(position: int, spec: TensorSpec, value: Any) -> Array:
    if (
        type(value) is np.ndarray
        and (value.dtype, value.shape) == (spec.dtype, spec.shape)
        and value.flags.c_contiguous
    ):
        return value
    shape, first = _nested(value)
    if len(shape) > MAXIMUM_AXES:
        raise InputError(f"input {position} must be {spec}, but its lists are nested more than {MAXIMUM_AXES} deep")
    if shape and shape != spec.shape:
        raise InputError(f"input {position} must be {spec}, but its shape is {list(shape)}")
    try:
        is_plain = isinstance(first, bool | int | float) and not isinstance(first, np.generic)
        array = _of_numbers(value, np.dtype(spec.dtype)) if is_plain else _as_array(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"input {position} ({spec}) cannot be read as an array: {error}") from error
    if array.dtype.kind in "OSU":
        raise InputError(f"input {position} must be {spec}, and not a {type(value).__name__}")
    if array.dtype != np.dtype(spec.dtype):
        raise InputError(
            f"input {position} must be {spec}, but its dtype is {array.dtype}; convert it: "
            f"numpy.asarray(value).astype({spec.dtype!r})"
        )
    if array.shape != spec.shape:
        raise InputError(f"input {position} must be {spec}, but its shape is {list(array.shape)}")
    return np.asarray(array, order="C")  # numpy.ascontiguousarray would give a scalar one dimension


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or of nested lists; () if it has none."""
    return tuple(getattr(value, "shape", None) or _nested(value)[0])


def _nested(value: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape of nested lists and their first item that is not a list; () and the value if it is not a list.

    Only the first item of each list counts: numpy reads all items, and never ends for a list that holds itself twice.
    """
    shape: tuple[int, ...] = ()
    while isinstance(value, list | tuple | range | deque) and len(shape) <= MAXIMUM_AXES:
        shape = (*shape, len(value))
        value = value[0] if value else None
    return (*shape, *getattr(value, "shape", ())) if shape else shape, value


def _of_numbers(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return an array of ``dtype``, or of numpy's dtype if this kind of number does not convert to ``dtype``.

    Raises:
        ValueError: ``dtype`` cannot hold one of the numbers.
    """
    array = np.asarray(value)
    numbers = np.asarray(value, object)
    is_whole = all(isinstance(number, int | np.integer) and not isinstance(number, bool) for number in numbers.flat)
    if array.dtype.kind not in "iufO" or dtype.kind not in ("iufV" if is_whole else "fV"):  # V: floats unknown to numpy
        return array
    try:
        with np.errstate(over="ignore"):
            converted = numbers.astype(dtype if dtype.kind in "iu" else np.float64).astype(dtype)
    except OverflowError as error:
        raise ValueError(f"{dtype} does not hold all of its numbers: {error}") from error
    held = converted if dtype.kind in "iu" else converted.astype(np.float64)
    for number, converted_number in zip(numbers.flat, held.astype(object).flat, strict=True):
        if number != converted_number if is_whole else math.isinf(converted_number) and not math.isinf(number):
            raise ValueError(f"{dtype} does not hold {number!r}")
    return converted


def _as_array(value: Any) -> Array:
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":  # unknown to numpy; float32 holds all its values
        return cast(Array, tensor.float().numpy().astype(ml_dtypes.bfloat16))
    return cast(Array, tensor.numpy())


def flat_bytes(array: Array) -> Bytes:
    """Return a row-major array's memory as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)
