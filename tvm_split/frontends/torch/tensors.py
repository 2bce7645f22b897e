"""Convert torch tensors to numpy arrays and back, including bfloat16, and to text for errors."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from tvm_split.errors import ModelImportError

IMPORTABLE = frozenset(
    (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
)  # fmt: skip
"""The dtypes of tensors in a network; values of others are computed during the import, if they need no input."""


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Copy ``tensor`` (any layout or device) to an array of the same shape and dtype."""
    return np.array(as_numpy(tensor))


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array of the same shape and dtype, which may share the memory of ``tensor``."""
    dense = tensor.detach().cpu()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    dense = dense.resolve_conj().resolve_neg().contiguous()
    is_bfloat16 = dense.dtype is torch.bfloat16
    array: np.ndarray[Any, Any] = (dense.view(torch.int16) if is_bfloat16 else dense).numpy()
    return array.view(ml_dtypes.bfloat16) if is_bfloat16 else array


def to_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Copy ``array`` to a torch tensor on the CPU."""
    if array.dtype == ml_dtypes.bfloat16:
        bits = np.array(array, order="C").view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16).reshape(array.shape)
    return torch.from_numpy(np.array(array, copy=True, order="C")).reshape(array.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """numpy's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def shown(value: Any) -> str:
    """Text for a value in errors: ``float32[2, 3]`` for a tensor, ``repr`` for others."""
    return f"{dtype_name(value.dtype)}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def remedy_for(dtype: torch.dtype) -> str:
    """What to do about a dtype that cannot be imported."""
    if dtype.is_complex:
        return "compute with real and imaginary parts apart (tensor.real, tensor.imag)"
    return "compute in float32 instead (tensor.float())"


def require_importable(dtype: torch.dtype, holder: str) -> None:
    """Raise ModelImportError, which begins with the ``holder`` of a tensor, for a dtype that cannot be imported."""
    if dtype not in IMPORTABLE:
        raise ModelImportError(
            f"{holder} has the dtype {dtype_name(dtype)}, which cannot be imported; {remedy_for(dtype)}"
        )
