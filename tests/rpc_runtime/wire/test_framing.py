"""Frames are decoded as they were encoded; invalid ones are rejected, never misread."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rpc_runtime.errors import ProtocolError
from rpc_runtime.wire.framing import (
    CHUNK_BYTES,
    HEADER,
    MAGIC,
    PROTOCOL_VERSION,
    FrameKind,
    control_frame,
    credit_frame,
    decode,
    frames_of,
    joined,
    tensor_frames,
)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_tensor_survives(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    frames = [decode(message) for message in tensor_frames(7, 2**40, data)]
    assert len(frames) == max(1, -(-size // CHUNK_BYTES))
    assert all((f.kind, f.tensor, f.sequence, f.total) == (FrameKind.TENSOR, 7, 2**40, size) for f in frames)
    assert [f.offset for f in frames] == [i * CHUNK_BYTES for i in range(len(frames))]
    assert b"".join(bytes(f.payload) for f in frames) == data.tobytes()


@given(st.lists(st.sampled_from([0, 4, 40_000, CHUNK_BYTES + 4]), max_size=6))
def test_small_frames_come_together_and_large_ones_alone(sizes: list[int]) -> None:
    frames = [credit_frame(1, 2, 3, [0, 1]), control_frame(FrameKind.HEARTBEAT)]
    for sequence, size in enumerate(sizes):
        frames += tensor_frames(7, sequence, np.full(size, sequence, np.uint8))
    messages = list(joined(frames))
    assert len(messages) <= 1 + 2 * sum(size > CHUNK_BYTES for size in sizes)
    assert [frame for message in messages for frame in frames_of(message)] == [*map(decode, frames)]
    with pytest.raises(ProtocolError):
        list(frames_of(messages[-1] + b"TVMS"))


@given(st.sampled_from([b"", MAGIC, control_frame(FrameKind.TENSOR)[:6]]), st.binary(max_size=120))
def test_random_bytes_are_refused_or_consistent(begin: bytes, rest: bytes) -> None:
    try:
        frame = decode(begin + rest)
    except ProtocolError:
        return
    assert frame.offset + len(frame.payload) <= frame.total


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((b"NOPE", 1, 3, 0, 0, 0, 0, 0, 0), "begins with"),
        ((MAGIC, 8, 3, 0, 0, 0, 0, 0, 0), f"version {PROTOCOL_VERSION}, the peer 8"),
        ((MAGIC, PROTOCOL_VERSION, 77, 0, 0, 0, 0, 0, 0), "unknown kind"),
        ((MAGIC, PROTOCOL_VERSION, 3, 4, 0, 0, 0, 0, 0), "TENSOR frame has the flags 0x4"),
        ((MAGIC, PROTOCOL_VERSION, 4, 1, 0, 0, 0, 0, 0), "CREDIT frame has the flags 0x1"),
        ((MAGIC, PROTOCOL_VERSION, 4, 0, 0, 0, 0, 0, 9), "announces 9 bytes and carries 0"),
        ((MAGIC, PROTOCOL_VERSION, 3, 0, 0, 0, 0, 0, 9), "what is left of its tensor; got 0 from byte 0 of 9"),
        ((MAGIC, PROTOCOL_VERSION, 3, 0, 0, 0, 0, 2**64 - 1, 9), "of a tensor of 9 bytes"),
    ],
)
def test_each_field_is_checked(fields: tuple[object, ...], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(HEADER.pack(*fields))


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (0, CHUNK_BYTES - 1), (1, CHUNK_BYTES), (CHUNK_BYTES, 8)])
def test_a_tensor_does_not_trickle(offset: int, size: int) -> None:
    """A peer that sends a byte per second would otherwise block the receiver forever."""
    header = HEADER.pack(MAGIC, PROTOCOL_VERSION, FrameKind.TENSOR, 0, 7, 0, 0, offset, CHUNK_BYTES + 9)
    with pytest.raises(ProtocolError, match=f"TENSOR frame carries .*got {size} from byte {offset} of"):
        decode(header + bytes(size))
