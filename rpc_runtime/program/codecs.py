"""Codecs: encode tensors in fewer bytes for slow links; lossy codecs change the values slightly.

A tensor is sent unencoded if encoding does not make it smaller, or if the codec cannot represent a value (int8: NaN and
infinities; fp16, bf16 and int8: numbers out of range). The receiver recognises an unencoded tensor by its size.
Received bytes are validated: bytes that do not encode exactly this tensor raise a `ProtocolError` that names it.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.specs import Array, Bytes, TensorSpec
from rpc_runtime.registry import Registry

NONE = "none"
"""The codec of a tensor that is sent unencoded."""
LARGEST_BLOCK_BYTES = 0x7E000000
"""Maximum size of a tensor with a codec; lz4 compresses no larger block at once."""
ZSTD_LEVEL = 1
"""Higher levels take much longer and compress activations hardly any better."""
SMALLEST_WINDOW_BYTES = 1024
SCALE_BYTES = 4
STEPS = 127
_SCALE = np.dtype("<f4")
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = 3.4e38
"""Slightly below the largest float32, so that rounding a scale cannot overflow."""


class Codec(ABC):
    """Encodes or decodes the micro-batches of one tensor. Not thread-safe.

    A subclass has `encode` and `decode`; if it is lossy, also `encoded_bytes`. Both may raise `ImportError` if
    ``module`` is missing. Links call `to_wire` and `from_wire`.
    """

    name: ClassVar[str]
    """The codec's name in cluster files, plans and messages."""
    is_lossy: ClassVar[bool] = False
    """Whether it may change values. Lossy codecs take float32 and float64, and write a known number of bytes."""
    module: ClassVar[str] = ""
    """The module that must be importable at both ends; empty if there is none."""
    package: ClassVar[str] = ""
    """The package to install for ``module``."""

    def __init__(self, tensor: TensorSpec) -> None:
        self.tensor = tensor

    @abstractmethod
    def encode(self, data: Bytes) -> Bytes | None:
        """Return the tensor's content (uint8) encoded, or None if it cannot be encoded."""

    @abstractmethod
    def decode(self, encoded: Bytes, data: Bytes) -> None:
        """Decode ``encoded`` into ``data``, the tensor's memory (uint8).

        Raises:
            ValueError: ``encoded`` is not a valid encoding of this tensor.
        """

    @property
    def encoded_bytes(self) -> int:
        """The encoded size of the tensor in bytes; the maximum for a lossless codec."""
        return self.tensor.size_bytes

    @property
    def unfit(self) -> str:
        """The reason why the codec does not fit the tensor; empty if it fits."""
        tensor = self.tensor
        if self.is_lossy and tensor.dtype not in ("float32", "float64"):
            return f"{self.name} is for float32 and float64, and this is {tensor.dtype}"
        if self.is_lossy and self.encoded_bytes >= tensor.size_bytes:
            return f"its {tensor.size_bytes} bytes would be {self.encoded_bytes} as {self.name}"
        if tensor.size_bytes > LARGEST_BLOCK_BYTES:
            return f"{self.name} takes {LARGEST_BLOCK_BYTES} bytes at most, and these are {tensor.size_bytes}"
        return ""

    @classmethod
    def is_available(cls) -> bool:
        """Return whether the codec's module can be imported in this process."""
        try:
            return not cls.module or bool(importlib.import_module(cls.module))
        except ImportError:
            return False

    def to_wire(self, data: Bytes) -> Bytes:
        """Return the bytes to send: the encoded content if it is smaller, else ``data`` itself."""
        encoded = self.encode(data)
        return data if encoded is None or encoded.size >= data.size else encoded

    def from_wire(self, encoded: Bytes, data: Bytes) -> None:
        """Decode the output of `to_wire` into ``data``, the tensor's memory.

        Raises:
            ProtocolError: ``encoded`` is not a valid encoding of this tensor.
        """
        if encoded.size == data.size:
            data[:] = encoded
            return
        try:
            if self.is_lossy and encoded.size != self.encoded_bytes:
                raise ValueError(f"it has {self.encoded_bytes} bytes")
            self.decode(encoded, data)
        except ValueError as error:
            raise ProtocolError(
                f"tensor {self.tensor} came as {encoded.size} bytes of {self.name} that cannot be decoded: {error}"
            ) from error


class Unencoded(Codec):
    """Sends tensors as they are."""

    name = NONE

    @property
    def unfit(self) -> str:
        return ""

    def encode(self, data: Bytes) -> Bytes | None:
        return None

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        raise ValueError("the tensor has no codec")


class Half(Codec):
    """Rounds to the nearest floating-point number of half the width; keeps NaN and infinities."""

    is_lossy = True
    narrow: ClassVar[np.dtype[Any]]

    @property
    def encoded_bytes(self) -> int:
        return 2 * math.prod(self.tensor.shape)

    def encode(self, data: Bytes) -> Bytes | None:
        values = data.view(self.tensor.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = values.astype(self.narrow)
        infinite = np.isinf(halves)
        if infinite.any() and not np.isinf(values[infinite]).all():
            return None
        return halves.view(np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        data.view(self.tensor.dtype)[:] = encoded.view(self.narrow)


class Float16(Half):
    name = "fp16"
    narrow = np.dtype(np.float16)


class BFloat16(Half):
    name = "bf16"
    narrow = np.dtype(ml_dtypes.bfloat16)


class Int8(Codec):
    """Quantizes to integers from -127 to 127, with one scale per channel: axis 1 of a 4-D tensor, else the last axis.

    If each channel has a single value, the tensor has one scale. The scales are written before the integers. The error
    is at most half a scale: 1/254 of the channel's largest magnitude.
    """

    name = "int8"
    is_lossy = True

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        return by_channel(self.tensor.shape)

    @property
    def _scale_bytes(self) -> int:
        return self._shape[1] * SCALE_BYTES

    @property
    def encoded_bytes(self) -> int:
        return self._scale_bytes + math.prod(self.tensor.shape)

    def encode(self, data: Bytes) -> Bytes | None:
        values = data.view(self.tensor.dtype).reshape(self._shape)
        largest = np.maximum(values.max(axis=(0, 2)), -values.min(axis=(0, 2)))
        if not (largest <= _LARGEST).all():
            return None
        scales = np.maximum(largest / STEPS, _TINY).astype(_SCALE)
        encoded = np.empty(self.encoded_bytes, np.uint8)
        encoded[: self._scale_bytes] = scales.view(np.uint8)
        steps = values * (1 / scales.astype(values.dtype))[:, None]
        self._numbers(encoded)[:] = np.rint(steps, out=steps)
        return encoded

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        scales = encoded[: self._scale_bytes].view(_SCALE)
        if not ((scales > 0) & (scales <= _LARGEST / STEPS * 1.0001)).all():
            raise ValueError(f"its scales should be above 0 and at most {_LARGEST / STEPS:g}")
        values = data.view(self.tensor.dtype).reshape(self._shape)
        np.multiply(self._numbers(encoded), scales[:, None], out=values)

    def _numbers(self, encoded: Bytes) -> Array:
        return encoded[self._scale_bytes :].view(np.int8).reshape(self._shape)


class Lossless(Codec):
    """Compresses tensors by the library ``module``."""

    @cached_property
    def _library(self) -> Any:
        return importlib.import_module(self.module)

    def _require_whole(self, size_bytes: int) -> None:
        if size_bytes != self.tensor.size_bytes:
            raise ValueError(f"it should decompress to {self.tensor.size_bytes} bytes, and it makes {size_bytes}")

    def _store(self, content: bytes, data: Bytes) -> None:
        self._require_whole(len(content))
        data[:] = np.frombuffer(content, np.uint8)


class Lz4(Lossless):
    """One LZ4 block without a stored size."""

    name = "lz4"
    module = "lz4.block"
    package = "lz4"

    def encode(self, data: Bytes) -> Bytes | None:
        return np.frombuffer(self._library.compress(data, store_size=False), np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        try:
            self._store(self._library.decompress(encoded, uncompressed_size=data.size), data)
        except self._library.LZ4BlockError as error:
            raise ValueError(str(error)) from error


class Zstd(Lossless):
    """One Zstandard frame, which stores the decompressed size."""

    name = "zstd"
    module = package = "zstandard"

    @cached_property
    def _compressor(self) -> Any:
        return self._library.ZstdCompressor(level=ZSTD_LEVEL)

    @cached_property
    def _decompressor(self) -> Any:
        # A frame may request a window of any size; it never needs more than its decompressed size.
        window = max(SMALLEST_WINDOW_BYTES, 1 << max(self.tensor.size_bytes - 1, 1).bit_length())
        return self._library.ZstdDecompressor(max_window_size=window)

    def encode(self, data: Bytes) -> Bytes | None:
        return np.frombuffer(self._compressor.compress(data), np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        try:
            # Check the size first: decompressing allocates as much memory as the frame states.
            self._require_whole(self._library.get_frame_parameters(encoded).content_size)
            self._store(self._decompressor.decompress(encoded, allow_extra_data=False), data)
        except self._library.ZstdError as error:
            raise ValueError(str(error)) from error


CODECS: Registry[type[Codec]] = Registry(
    "tvm_split.codecs",
    "codec",
    {codec.name: codec for codec in (Unencoded, Float16, BFloat16, Int8, Lz4, Zstd)},
    Codec,
)


def fitting(name: str, tensor: TensorSpec) -> str:
    """Return the codec's name, or `NONE` if it does not fit the tensor."""
    return NONE if CODECS[name](tensor).unfit else name


def by_channel(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return a shape as (elements before the channel axis, channels, elements after it).

    Channels that hold one value each count as one channel, because their scales would be larger than the values.
    """
    before, channels, behind = math.prod(shape[:-1]), math.prod(shape[-1:]), 1
    if len(shape) == 4:
        before, channels, behind = shape[0], shape[1], shape[2] * shape[3]
    return (1, 1, channels) if before * behind == 1 else (before, channels, behind)
