"""Writes tensors in fewer bytes for a link that limits, and reads them again; which codecs there are: `program.codec`.

A tensor that a codec would make no smaller, or whose values it cannot hold but for rounding (to int8 NaN and
infinities; to fp16, bf16 and int8 numbers beyond their range), travels as it is: the receiver knows it by its size.
Nothing that comes is believed: what is no encoding of exactly this tensor is a `ProtocolError` that names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.program.codec import SCALE_BYTES, Codec, by_channel, encoded_bytes
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Array, Bytes

LIBRARIES = {Codec.LZ4: ("lz4.block", "lz4"), Codec.ZSTD: ("zstandard", "zstandard")}
"""Of each codec that needs one: the module, and the package that has it."""
ZSTD_LEVEL = 1
"""Higher ones take much longer, and save next to nothing of activations."""
SMALLEST_WINDOW_BYTES = 1024
STEPS = 127
_SCALE = np.dtype("<f4")
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = 3.4e38
"""A little less than the largest of float32, so that no rounding of a scale leads beyond it."""


def is_available(codec: Codec) -> bool:
    """Whether this process has what a codec needs."""
    try:
        return codec not in LIBRARIES or bool(importlib.import_module(LIBRARIES[codec][0]))
    except ImportError:
        return False


def require_available(routes: Iterable[Route]) -> None:
    """Raise a `WorkerError` if this process lacks what the codec of a route needs; names the package."""
    for route in routes:
        if not is_available(route.codec):
            raise WorkerError(
                f"tensor {route.tensor.name!r} travels from {route.source!r} to {route.destination!r} as "
                f"{route.codec}, which needs the package {LIBRARIES[route.codec][1]!r} at both ends, and is missing: "
                "pip install 'tvm-split[codecs]', or give the link another codec"
            )


class _Scheme(Protocol):
    def encode(self, data: Bytes) -> Bytes | None:
        """A tensor's content encoded; None where it cannot be."""
        ...

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        """The content of ``encoded``, written to ``data``.

        Raises:
            ValueError: there is another.
        """
        ...


class TensorCoder:
    """Encodes, or decodes, the micro-batches of one tensor. For one thread.

    Raises:
        WorkerError: a library is missing.
    """

    def __init__(self, codec: Codec, tensor: TensorSpec) -> None:
        self._codec = codec
        self._tensor = tensor
        self._scheme = _scheme(codec, tensor)

    def encode(self, data: Bytes) -> Bytes:
        """A tensor's content as it travels: encoded where that is smaller, else as it is."""
        encoded = self._scheme.encode(data)
        return data if encoded is None or encoded.size >= data.size else encoded

    def may_have(self, size_bytes: int) -> bool:
        """Whether the tensor may travel in so many bytes."""
        whole = self._tensor.size_bytes
        expected = encoded_bytes(self._codec, self._tensor)
        return (
            size_bytes in (whole, expected) if self._codec.is_lossy else 0 < size_bytes < whole or size_bytes == whole
        )

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        """What `encode` gave, written to ``data``, the tensor's memory.

        Raises:
            ProtocolError: it is nothing that `encode` gives for this tensor.
        """
        if encoded.size == data.size:
            data[:] = encoded
            return
        try:
            self._scheme.decode(encoded, data)
        except ValueError as error:
            raise ProtocolError(
                f"tensor {self._tensor} came as {encoded.size} bytes of {self._codec} that are none: {error}"
            ) from error


def coder_of(route: Route) -> TensorCoder | None:
    """What encodes or decodes a route's tensor in a stream; None where it travels as it is."""
    return None if route.codec is Codec.NONE else TensorCoder(route.codec, route.tensor)


def _scheme(codec: Codec, tensor: TensorSpec) -> _Scheme:
    if codec is Codec.INT8:
        return _Int8(tensor)
    if codec is Codec.LZ4:
        return _Lz4()
    if codec is Codec.ZSTD:
        return _Zstd(tensor.size_bytes)
    return _Half(np.dtype(np.float16 if codec is Codec.FP16 else ml_dtypes.bfloat16), np.dtype(tensor.dtype))


class _Half:
    """Rounded to the nearest; NaN and infinities stay what they are."""

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
    """The channels' scales, then the whole numbers. It is off by half a scale at most: 1/254 of the channel's largest
    magnitude."""

    def __init__(self, tensor: TensorSpec) -> None:
        self._shape = by_channel(tensor.shape)
        self._scale_bytes = self._shape[1] * SCALE_BYTES
        self._size = encoded_bytes(Codec.INT8, tensor)
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
    """One block, which does not say how large it will be."""

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
    """One frame, which says how large it will be."""

    def __init__(self, size_bytes: int) -> None:
        self._library: Any = importlib.import_module("zstandard")
        # A frame may ask for a window of any size; none needs more than what it holds.
        window = max(SMALLEST_WINDOW_BYTES, 1 << max(size_bytes - 1, 1).bit_length())
        self._compressor = self._library.ZstdCompressor(level=ZSTD_LEVEL)
        self._decompressor = self._library.ZstdDecompressor(max_window_size=window)

    def encode(self, data: Bytes) -> Bytes | None:
        return np.frombuffer(self._compressor.compress(data), np.uint8)

    def decode(self, encoded: Bytes, data: Bytes) -> None:
        try:
            # Before anything is decompressed, which takes as much memory as the frame says.
            _require_size(self._library.get_frame_parameters(encoded).content_size, data)
            found = self._decompressor.decompress(encoded, allow_extra_data=False)
        except self._library.ZstdError as error:
            raise ValueError(str(error)) from error
        _require_size(len(found), data)
        data[:] = np.frombuffer(found, np.uint8)


def _require_size(size_bytes: int, data: Bytes) -> None:
    if size_bytes != data.size:
        raise ValueError(f"it should decompress to {data.size} bytes, and it makes {size_bytes}")
