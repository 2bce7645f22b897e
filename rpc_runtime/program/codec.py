"""How a tensor may be written for a link that limits: in fewer bytes, of which some change its values a little."""

from __future__ import annotations

import enum
import math
from typing import Protocol

SCALE_BYTES = 4
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


class Codec(enum.StrEnum):
    """``FP16``, ``BF16``: floating-point numbers of half the width. ``INT8``: whole numbers from -127 to 127, times a
    scale for each channel (axis 1 of four, else the last one), or one scale for all where channels have one value.
    ``LZ4``, ``ZSTD``: compressed, with nothing lost.
    """

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    LZ4 = "lz4"
    ZSTD = "zstd"

    @property
    def is_lossy(self) -> bool:
        return self in (Codec.FP16, Codec.BF16, Codec.INT8)


def by_channel(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape seen as what is before the channels, the channels, and what is behind them.

    Channels of one value each count as one: a scale for each would take more than the values.
    """
    before, channels, behind = math.prod(shape[:-1]), math.prod(shape[-1:]), 1
    if len(shape) == 4:
        before, channels, behind = shape[0], shape[1], shape[2] * shape[3]
    return (1, 1, channels) if before * behind == 1 else (before, channels, behind)


def encoded_bytes(codec: Codec, tensor: Tensor) -> int:
    """What a lossy codec makes of a tensor; of a lossless one, the most that it may."""
    if codec is Codec.INT8:
        return by_channel(tensor.shape)[1] * SCALE_BYTES + math.prod(tensor.shape)
    return 2 * math.prod(tensor.shape) if codec.is_lossy else tensor.size_bytes


def unfit(codec: Codec, tensor: Tensor) -> str:
    """Why a codec can be of no use for a tensor; empty if it can."""
    if codec.is_lossy and tensor.dtype not in ("float32", "float64"):
        return f"{codec} is for float32 and float64, and this is {tensor.dtype}"
    if codec.is_lossy and encoded_bytes(codec, tensor) >= tensor.size_bytes:
        return f"its {tensor.size_bytes} bytes would be {encoded_bytes(codec, tensor)} as {codec}"
    if codec is not Codec.NONE and tensor.size_bytes > LARGEST_BLOCK_BYTES:
        return f"{codec} takes {LARGEST_BLOCK_BYTES} bytes at most, and these are {tensor.size_bytes}"
    return ""


def fits(codec: Codec, tensor: Tensor) -> bool:
    """Whether a codec can be of use for a tensor: lossy ones for float32 and float64 alone, where they save bytes."""
    return not unfit(codec, tensor)


def fitting(codec: Codec, tensor: Tensor) -> Codec:
    """The codec, or none where it does not fit."""
    return codec if fits(codec, tensor) else Codec.NONE
