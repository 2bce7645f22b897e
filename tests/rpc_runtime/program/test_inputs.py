"""Arrays that do not match the program's inputs are rejected; the message has both sides of the mismatch."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.program.inputs import checked_inputs, client_arrays
from rpc_runtime.program.program import InputSlice, Program
from rpc_runtime.program.specs import TensorSpec
from tests.helpers.rpc_runtime.specs import tensor

X = np.zeros(2, np.float32)
ENDLESS: list[Any] = []
ENDLESS += [ENDLESS, ENDLESS]
DEEP: Any = 1.0
for _ in range(60):
    DEEP = [DEEP, DEEP]
PROGRAM = Program((tensor("x"), TensorSpec("image", (2, 3), "uint8")), (), ())


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "inputs are x: .*, image: .*; 0 were given"),
        ([X], "inputs are x: .*, image: .*; 1 were given"),
        (np.zeros((2, 2), np.float32), "inputs are x: .*, image: .*; one array was given"),
        ([X, np.zeros((3, 2), np.uint8)], r"input 1 must be image: uint8\[2, 3\], but its shape is \[3, 2\]"),
        ([X, np.zeros((2, 3), np.int8)], r"input 1 must be image: uint8\[2, 3\], but its dtype is int8"),
        ([np.float32(0), np.zeros((2, 3), np.uint8)], r"input 0 must be x: float32\[2\], but its shape is \[\]"),
    ],
)
def test_what_does_not_fit_is_refused(inputs: Sequence[np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        checked_inputs(PROGRAM.inputs, inputs)


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("float32", [0.1, 2]),
        ("float16", [1, -2]),
        ("bfloat16", [0.1, 0.5]),
        ("uint8", [0, 255]),
        ("int64", [-(2**62), 1]),
        ("uint64", [2**64 - 1, 1]),
        ("float32", [2**63, 1]),
        ("bool", [True, False]),
    ],
)
def test_numbers_of_python_get_the_dtype_of_the_input(dtype: str, numbers: Sequence[float]) -> None:
    program = Program((TensorSpec("x", (2,), dtype),), (), ())
    (array,) = checked_inputs(program.inputs, [numbers])
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, np.array(numbers, dtype))


@pytest.mark.parametrize(
    ("dtype", "numbers", "words"),
    [
        ("uint8", [0, 256], r"input 0 \(x: uint8\[2\]\) cannot be read as an array: uint8 does not hold all of its"),
        ("int32", [0.5, 1.0], "float64"),
        ("bool", [0, 1], "int64"),
        ("float32", [True, False], "bool"),
        ("float32", [2**24 + 1, 0], "float32 does not hold 16777217"),
        ("float32", [1.0, 1e300], r"float32 does not hold 1e\+300"),
        ("bfloat16", [10**400, 0], "does not hold"),
        ("float32", "words", "not a str"),
        ("float32", None, "not a NoneType"),
        ("float32", [np.float64(0.1), np.float64(0.2)], "float64"),
        ("float32", [1.0, [2.0, 3.0]], "cannot be read as an array"),
        ("float32", [np.ones(1), np.ones(1)], r"its shape is \[2, 1\]"),
        ("float32", ENDLESS, r"input 0 .* more than 64 deep"),
        ("float32", deque([ENDLESS]), "more than 64 deep"),
        ("float32", [1.0, ENDLESS], "cannot be read as an array"),
        ("float32", DEEP, r"its shape is \[2, 2, 2"),
        ("float32", range(10**15), r"its shape is \[1000000000000000\]"),
    ],
)
def test_numbers_that_the_input_cannot_hold_are_refused(dtype: str, numbers: Sequence[float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        checked_inputs((TensorSpec("x", (2,), dtype),), [numbers])


def test_inputs_become_row_major() -> None:
    image = np.arange(6, dtype=np.uint8).reshape(3, 2).T
    x, array = checked_inputs(PROGRAM.inputs, [X, image])
    assert x is X
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, image)


def test_the_client_has_inputs_and_cuts_of_them() -> None:
    cuts = (
        InputSlice(TensorSpec("upper", (1, 3), "uint8"), "image", 0, 0),
        InputSlice(TensorSpec("right", (2, 2), "uint8"), "image", 1, 1),
    )
    program = Program(PROGRAM.inputs, (), (), input_slices=cuts)
    assert [spec.name for spec in program.client_tensors] == ["x", "image", "upper", "right"]
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    x, whole, upper, right = client_arrays(program, [X, image])
    assert (x is X, whole is image) == (True, True)
    np.testing.assert_array_equal(upper, [[0, 1, 2]])
    np.testing.assert_array_equal(right, [[1, 2], [4, 5]])
    assert right.flags.c_contiguous
