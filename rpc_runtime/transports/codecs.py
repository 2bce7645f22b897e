"""The built-in codecs, and the coder that encodes and decodes one tensor of a link.

A tensor is sent unencoded if encoding does not make it smaller, or if the codec cannot represent a value (int8: NaN and
infinities; fp16, bf16 and int8: numbers out of range). The receiver recognises an unencoded tensor by its size.
Received bytes are validated: bytes that do not encode exactly this tensor raise a `ProtocolError` that names it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.program.codec import CODECS, NONE, Codec, Coder, Tensor, elements
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Array, Bytes

ZSTD_LEVEL = 1
"""Higher levels take much longer and compress activations hardly any better."""
SMALLEST_WINDOW_BYTES = 1024
SCALE_BYTES = 4
STEPS = 127
_SCALE = np.dtype("<f4")
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = 3.4e38
"""Slightly below the largest float32, so that rounding a scale cannot overflow."""


def require_available(routes: Iterable[Route]) -> None:
    """Raise a `WorkerError` that names the missing package if this process cannot use the codec of a route."""
    for route in routes:
        if route.codec != NONE and not (codec := CODECS[route.codec]).is_available():
            raise WorkerError(
                f"tensor {route.tensor.name!r} travels from {route.source!r} to {route.destination!r} as "
                f"{route.codec}, which needs the package {codec.package!r} at both ends, and is missing: "
                "pip install 'tvm-split[codecs]', or give the link another codec"
            )


class TensorCoder:
    """Encodes or decodes the micro-batches of one tensor. Not thread-safe.

    Raises:
        InputError: there is no codec of this name.
        ImportError: a library is missing.
    """

    def __init__(self, codec: str, tensor: TensorSpec) -> None:
        self._codec = CODECS[codec]
        self._tensor = tensor
        self._coder = self._codec.coder(tensor)

    def encode(self, data: Bytes) -> Bytes:
        """Return the bytes to send: the encoded content if it is smaller, else ``data`` itself."""
        encoded = self._coder.encode(data)
        return data if encoded is None or encoded.size >= data.size else encoded

    def may_have(self, size_bytes: int) -> bool:
        """Return whether ``size_bytes`` is a possible size of this tensor on the wire."""
        whole = self._tensor.size_bytes
        if self._codec.is_lossy:
            return size_bytes in (whole, self._codec.encoded_bytes(self._tensor))
        return 0 < size_bytes < whole or size_bytes == whole

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        """Decode the output of `encode` into ``data``, the tensor's memory.

        Raises:
            ProtocolError: ``encoded`` is not a valid encoding of this tensor.
        """
        if encoded.size == data.size:
            data[:] = encoded
            return
        try:
            self._coder.decode(encoded, data)
        except ValueError as error:
            raise ProtocolError(
                f"tensor {self._tensor} came as {encoded.size} bytes of {self._codec.name} that are none: {error}"
            ) from error


def coder_of(route: Route) -> TensorCoder | None:
    """Return the coder of a route's tensor, or None if the route has no codec."""
    return None if route.codec == NONE else TensorCoder(route.codec, route.tensor)


class Half(Codec):
    """Floating-point numbers of half the width."""

    is_lossy = True
    narrow: np.dtype[Any]

    def encoded_bytes(self, tensor: Tensor) -> int:
        return 2 * elements(tensor)

    def coder(self, tensor: Tensor) -> Coder:
        return _Half(self.narrow, np.dtype(tensor.dtype))


class Float16(Half):
    name = "fp16"
    narrow = np.dtype(np.float16)


class BFloat16(Half):
    name = "bf16"
    narrow = np.dtype(ml_dtypes.bfloat16)


class Int8(Codec):
    """Integers from -127 to 127 with one scale per channel (axis 1 of a 4-D tensor, else the last axis), or one scale
    for the tensor if each channel has a single value."""

    name = "int8"
    is_lossy = True

    def encoded_bytes(self, tensor: Tensor) -> int:
        return by_channel(tensor.shape)[1] * SCALE_BYTES + elements(tensor)

    def coder(self, tensor: Tensor) -> Coder:
        return _Int8(tensor, self.encoded_bytes(tensor))


class Lz4(Codec):
    """Lossless LZ4 compression."""

    name = "lz4"
    module = "lz4.block"
    package = "lz4"

    def coder(self, tensor: Tensor) -> Coder:
        return _Lz4()


class Zstd(Codec):
    """Lossless Zstandard compression."""

    name = "zstd"
    module = package = "zstandard"

    def coder(self, tensor: Tensor) -> Coder:
        return _Zstd(tensor.size_bytes)


FP16, BF16, INT8, LZ4, ZSTD = Float16(), BFloat16(), Int8(), Lz4(), Zstd()


def by_channel(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return a shape as (elements before the channel axis, channels, elements after it).

    Channels that hold one value each count as one channel, because their scales would be larger than the values.
    """
    before, channels, behind = math.prod(shape[:-1]), math.prod(shape[-1:]), 1
    if len(shape) == 4:
        before, channels, behind = shape[0], shape[1], shape[2] * shape[3]
    return (1, 1, channels) if before * behind == 1 else (before, channels, behind)


class _Half:
    """Rounds to the nearest value of half the width; keeps NaN and infinities."""

    def __init__(self, narrow: np.dtype[Any], wide: np.dtype[Any]) -> None:
        self._narrow = narrow
        self._wide = wide

    def encode(self, data: Bytes) -> Bytes | None:
        values = data.view(self._wide)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = values.astype(self._narrow)
        endless = np.isinf(halves)
        if endless.any() and not np.isinf(values[endless]).all():
            return None
        return halves.view(np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        data.view(self._wide)[:] = encoded.view(self._narrow)


class _Int8:
    """Writes the scales of the channels, then the integers. The error is at most half a scale: 1/254 of the channel's
    largest magnitude."""

    def __init__(self, tensor: Tensor, size_bytes: int) -> None:
        self._shape = by_channel(tensor.shape)
        self._scale_bytes = self._shape[1] * SCALE_BYTES
        self._size = size_bytes
        self._dtype = np.dtype(tensor.dtype)

    def encode(self, data: Bytes) -> Bytes | None:
        values = data.view(self._dtype).reshape(self._shape)
        largest = np.maximum(values.max(axis=(0, 2)), -values.min(axis=(0, 2)))
        if not (largest <= _LARGEST).all():
            return None
        scales = np.maximum(largest / STEPS, _TINY).astype(_SCALE)
        encoded = np.empty(self._size, np.uint8)
        encoded[: self._scale_bytes] = scales.view(np.uint8)
        steps = values * (1 / scales.astype(self._dtype))[:, None]
        self._numbers(encoded)[:] = np.rint(steps, out=steps)
        return encoded

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        scales = encoded[: self._scale_bytes].view(_SCALE)
        if not ((scales > 0) & (scales <= _LARGEST / STEPS * 1.0001)).all():
            raise ValueError(f"its scales should be above 0 and at most {_LARGEST / STEPS:g}")
        np.multiply(self._numbers(encoded), scales[:, None], out=data.view(self._dtype).reshape(self._shape))

    def _numbers(self, encoded: Bytes) -> Array:
        return encoded[self._scale_bytes :].view(np.int8).reshape(self._shape)


class _Lz4:
    """Compresses to one LZ4 block without a stored size."""

    def __init__(self) -> None:
        self._block: Any = importlib.import_module("lz4.block")

    def encode(self, data: Bytes) -> Bytes | None:
        return np.frombuffer(self._block.compress(data, store_size=False), np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        try:
            found = self._block.decompress(encoded, uncompressed_size=data.size)
        except self._block.LZ4BlockError as error:
            raise ValueError(str(error)) from error
        _require_size(len(found), data)
        data[:] = np.frombuffer(found, np.uint8)


class _Zstd:
    """Compresses to one Zstandard frame, which stores the decompressed size."""

    def __init__(self, size_bytes: int) -> None:
        self._library: Any = importlib.import_module("zstandard")
        # A frame may request a window of any size; it never needs more than its decompressed size.
        window = max(SMALLEST_WINDOW_BYTES, 1 << max(size_bytes - 1, 1).bit_length())
        self._compressor = self._library.ZstdCompressor(level=ZSTD_LEVEL)
        self._decompressor = self._library.ZstdDecompressor(max_window_size=window)

    def encode(self, data: Bytes) -> Bytes | None:
        return np.frombuffer(self._compressor.compress(data), np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        try:
            # Check the size first: decompressing allocates as much memory as the frame states.
            _require_size(self._library.get_frame_parameters(encoded).content_size, data)
            found = self._decompressor.decompress(encoded, allow_extra_data=False)
        except self._library.ZstdError as error:
            raise ValueError(str(error)) from error
        _require_size(len(found), data)
        data[:] = np.frombuffer(found, np.uint8)


def _require_size(size_bytes: int, data: Bytes) -> None:
    if size_bytes != data.size:
        raise ValueError(f"it should decompress to {data.size} bytes, and it makes {size_bytes}")
