"""How a tensor may be written for a slow link: in fewer bytes, of which some change its values a little."""

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
"""The name for a tensor that travels as it is."""
LARGEST_BLOCK_BYTES = 0x7E000000
"""More lz4 does not take at once."""


class Tensor(Protocol):
    """What a codec has to know of one: `rpc_runtime.program.program.TensorSpec`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


class Coder(Protocol):
    """Encodes and decodes the micro-batches of one tensor. For one thread."""

    def encode(self, data: Bytes) -> Bytes | None:
        """Return a tensor's content (uint8) encoded; None where it cannot be."""

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        """Write the content of ``encoded`` to ``data``, the tensor's memory (uint8).

        Raises:
            ValueError: it is no encoding of this tensor.
        """


class Codec(ABC):
    """One way of writing tensors. Stateless; `coder` gives what has state.

    Raises:
        ImportError: of `coder`, where ``module`` is missing.
    """

    name: ClassVar[str]
    """In cluster files, plans and messages."""
    is_lossy: ClassVar[bool] = False
    """Whether it may change values. Lossy codecs are for float32 and float64, and give a known number of bytes."""
    module: ClassVar[str] = ""
    """What has to be importable at both ends."""
    package: ClassVar[str] = ""
    """The package that has ``module``."""

    @abstractmethod
    def coder(self, tensor: Tensor) -> Coder:
        """Return what encodes and decodes a tensor that the codec fits."""

    def encoded_bytes(self, tensor: Tensor) -> int:
        """Return what a lossy codec makes of a tensor; of a lossless one, the most that it may."""
        return tensor.size_bytes

    def unfit(self, tensor: Tensor) -> str:
        """Return why the codec can be of no use for a tensor; empty if it can."""
        if self.is_lossy and tensor.dtype not in ("float32", "float64"):
            return f"{self.name} is for float32 and float64, and this is {tensor.dtype}"
        if self.is_lossy and self.encoded_bytes(tensor) >= tensor.size_bytes:
            return f"its {tensor.size_bytes} bytes would be {self.encoded_bytes(tensor)} as {self.name}"
        if tensor.size_bytes > LARGEST_BLOCK_BYTES:
            return f"{self.name} takes {LARGEST_BLOCK_BYTES} bytes at most, and these are {tensor.size_bytes}"
        return ""

    def is_available(self) -> bool:
        """Return whether this process has what the codec needs."""
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
    """Raise a `ValueError` if no codec has this name."""
    if name != NONE and name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; there are {', '.join((NONE, *CODECS))}")


def is_lossy(name: str) -> bool:
    """Return whether the codec of this name, or none, may change values."""
    return name != NONE and CODECS[name].is_lossy


def encoded_bytes(name: str, tensor: Tensor) -> int:
    """Return the bytes of a tensor as a codec writes it; of a lossless one, the most that it may have."""
    return tensor.size_bytes if name == NONE else CODECS[name].encoded_bytes(tensor)


def unfit(name: str, tensor: Tensor) -> str:
    """Return why a codec can be of no use for a tensor; empty if it can, as of none."""
    return "" if name == NONE else CODECS[name].unfit(tensor)


def fitting(name: str, tensor: Tensor) -> str:
    """Return the codec, or none where it does not fit."""
    return NONE if unfit(name, tensor) else name


def elements(tensor: Tensor) -> int:
    """Return the number of a tensor's elements."""
    return math.prod(tensor.shape)
