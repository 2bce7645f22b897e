"""Codecs: encode tensors in fewer bytes for slow links; lossy codecs change the values slightly."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rpc_runtime.registry import Registry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[Any]

NONE = "none"
"""The codec name of a tensor that is sent unencoded."""
LARGEST_BLOCK_BYTES = 0x7E000000
"""Maximum size of a tensor with a codec; lz4 compresses no larger block at once."""


class Tensor(Protocol):
    """The tensor attributes that a codec needs; `rpc_runtime.program.program.TensorSpec` has them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


class Coder(Protocol):
    """Encodes and decodes the micro-batches of one tensor. Not thread-safe."""

    def encode(self, data: Bytes) -> Bytes | None:
        """Return a tensor's content (uint8) encoded, or None if it cannot be encoded."""

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        """Decode ``encoded`` into ``data``, the tensor's memory (uint8).

        Raises:
            ValueError: ``encoded`` is no encoding of this tensor.
        """


class Codec(ABC):
    """An encoding of tensors. Stateless; `coder` returns an object with state.

    Raises:
        ImportError: by `coder`, if ``module`` is missing.
    """

    name: ClassVar[str]
    """The codec's name in cluster files, plans and messages."""
    is_lossy: ClassVar[bool] = False
    """Whether it may change values. Lossy codecs take float32 and float64, and write a known number of bytes."""
    module: ClassVar[str] = ""
    """The module that must be importable at both ends; empty if there is none."""
    package: ClassVar[str] = ""
    """The package to install for ``module``."""

    @abstractmethod
    def coder(self, tensor: Tensor) -> Coder:
        """Return an object that encodes and decodes a tensor that fits the codec."""

    def encoded_bytes(self, tensor: Tensor) -> int:
        """Return the encoded size of a tensor in bytes; the maximum for a lossless codec."""
        return tensor.size_bytes

    def unfit(self, tensor: Tensor) -> str:
        """Return the reason why the codec does not fit a tensor; empty if it fits."""
        if self.is_lossy and tensor.dtype not in ("float32", "float64"):
            return f"{self.name} is for float32 and float64, and this is {tensor.dtype}"
        if self.is_lossy and self.encoded_bytes(tensor) >= tensor.size_bytes:
            return f"its {tensor.size_bytes} bytes would be {self.encoded_bytes(tensor)} as {self.name}"
        if tensor.size_bytes > LARGEST_BLOCK_BYTES:
            return f"{self.name} takes {LARGEST_BLOCK_BYTES} bytes at most, and these are {tensor.size_bytes}"
        return ""

    def is_available(self) -> bool:
        """Return whether the codec's module can be imported in this process."""
        try:
            return not self.module or bool(importlib.import_module(self.module))
        except ImportError:
            return False


_MODULE = "rpc_runtime.transports.codecs"
CODECS: Registry[Codec] = Registry(
    "tvm_split.codecs",
    "codec",
    {name: f"{_MODULE}:{name.upper()}" for name in ("fp16", "bf16", "int8", "lz4", "zstd")},
    base=Codec,
)


def require_known(name: str) -> None:
    """Raise `ValueError` if no codec has this name."""
    if name != NONE and name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; there are {', '.join((NONE, *CODECS))}")


def is_lossy(name: str) -> bool:
    """Return whether the codec of this name may change values; False for `NONE`."""
    return name != NONE and CODECS[name].is_lossy


def encoded_bytes(name: str, tensor: Tensor) -> int:
    """Return the size in bytes of a tensor encoded by a named codec; the maximum for a lossless codec."""
    return tensor.size_bytes if name == NONE else CODECS[name].encoded_bytes(tensor)


def unfit(name: str, tensor: Tensor) -> str:
    """Return the reason why a named codec does not fit a tensor; empty if it fits, and for `NONE`."""
    return "" if name == NONE else CODECS[name].unfit(tensor)


def fitting(name: str, tensor: Tensor) -> str:
    """Return the codec's name, or `NONE` if it does not fit the tensor."""
    return NONE if unfit(name, tensor) else name


def elements(tensor: Tensor) -> int:
    """Return the number of a tensor's elements."""
    return math.prod(tensor.shape)
