"""A weight's file is taken apart, or refused with what is wrong with it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save

from rpc_runtime.errors import BlobError
from rpc_runtime.execution.safetensors_file import single_tensor
from rpc_runtime.program.program import TensorSpec


def content(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.frombuffer(save(tensors), np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int64", "bool"])
def test_every_dtype(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(np.dtype(dtype))
    data = single_tensor(content({"weight": array}), TensorSpec("w", (2, 3), dtype))
    assert data.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"other": np.ones(2, np.float32)}, "no safetensors file with a tensor named"),
        ({"weight": np.ones(2, np.float32), "more": np.ones(2, np.float32)}, "holds"),
        ({"weight": np.ones(3, np.float32)}, r"float32\[3\]"),
        ({"weight": np.ones(2, ml_dtypes.bfloat16)}, "bfloat16"),
    ],
)
def test_the_wrong_file(tensors: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(BlobError, match=words):
        single_tensor(content(tensors), TensorSpec("w", (2,), "float32"))


def test_a_file_that_is_cut() -> None:
    with pytest.raises(BlobError, match="cut"):
        single_tensor(content({"weight": np.ones(2, np.float32)})[:-1], TensorSpec("w", (2,), "float32"))


@given(st.binary(max_size=100))
def test_random_bytes(junk: bytes) -> None:
    with pytest.raises(BlobError):
        single_tensor(np.frombuffer(junk, np.uint8), TensorSpec("w", (2,), "float32"))


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 8]}}',
        b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}}',
        b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}}',
        b'{"weight": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}',
        b'{"weight": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}',
    ],
)
def test_a_forged_header(header: bytes) -> None:
    forged = len(header).to_bytes(8, "little") + header + bytes(8)
    with pytest.raises(BlobError):
        single_tensor(np.frombuffer(forged, np.uint8), TensorSpec("w", (2,), "float32"))
