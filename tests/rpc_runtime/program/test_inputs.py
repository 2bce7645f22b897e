"""Arrays that are not the program's inputs are refused, with both sides of the mismatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.helpers.rpc_runtime.specs import tensor
from tvm_split.rpc_runtime.errors import InputError
from tvm_split.rpc_runtime.program.inputs import checked_inputs, given_arrays
from tvm_split.rpc_runtime.program.program import InputCut, Program, TensorSpec

X = np.zeros(2, np.float32)
PROGRAM = Program((tensor("x"), TensorSpec("image", (2, 3), "uint8")), (), ())


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "takes 2 inputs .*, 0 were given"),
        ([X], "takes 2 inputs .*, 1 were given"),
        (np.zeros((2, 2), np.float32), "takes 2 inputs .*, one array was given"),
        ([X, np.zeros((3, 2), np.uint8)], r"input 1 must be image: uint8\[2, 3\], but its shape is \[3, 2\]"),
        ([X, np.zeros((2, 3), np.int8)], r"input 1 must be image: uint8\[2, 3\], but its dtype is int8"),
        ([np.float32(0), np.zeros((2, 3), np.uint8)], r"input 0 must be x: float32\[2\], but its shape is \[\]"),
    ],
)
def test_what_does_not_fit_is_refused(inputs: Sequence[np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        checked_inputs(PROGRAM, inputs)


def test_inputs_become_row_major() -> None:
    image = np.arange(6, dtype=np.uint8).reshape(3, 2).T
    x, found = checked_inputs(PROGRAM, [X, image])
    assert x is X
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, image)


def test_the_client_has_inputs_and_cuts_of_them() -> None:
    cuts = (
        InputCut(TensorSpec("upper", (1, 3), "uint8"), "image", 0, 0),
        InputCut(TensorSpec("right", (2, 2), "uint8"), "image", 1, 1),
    )
    program = Program(PROGRAM.inputs, (), (), cuts=cuts)
    assert [each.name for each in program.given] == ["x", "image", "upper", "right"]
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    x, whole, upper, right = given_arrays(program, [X, image])
    assert (x is X, whole is image) == (True, True)
    np.testing.assert_array_equal(upper, [[0, 1, 2]])
    np.testing.assert_array_equal(right, [[1, 2], [4, 5]])
    assert right.flags.c_contiguous
