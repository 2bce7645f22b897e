"""The frame format of data streams: raw bytes with a fixed little-endian header and a payload.

=========  =========  ==============================================================================================
field      bytes      meaning
=========  =========  ==============================================================================================
magic      4          ``b"TVMS"``
version    1          ``PROTOCOL_VERSION``
kind       1          :class:`FrameKind`
flags      2          :class:`FrameFlag`, 0 except in frames of kind ``TENSOR``
tensor     4          index of the tensor in the deployment's table of routes
epoch      4          epoch of the link, always 0
sequence   8          number of the micro-batch, from 0
offset     8          position of the payload in the encoded tensor, in bytes
total      8          size of the whole encoded tensor, in bytes
=========  =========  ==============================================================================================

A tensor larger than ``CHUNK_BYTES`` is sent as several frames of that size and one with the rest, in order. They are
not interleaved with other tensors of the same stream. Smaller frames are refused, so that a peer cannot keep a link
busy byte by byte. A gRPC message holds one frame, or several small ones. All input is untrusted: an invalid frame
raises :class:`ProtocolError`.
"""

import enum
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from google.protobuf.message import DecodeError

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.specs import Bytes
from rpc_runtime.wire.text import AnyMessage, clean_message, cleaned

PROTOCOL_VERSION = 14
MAGIC = b"TVMS"
HEADER = struct.Struct("<4sBBHIIQQQ")
CHUNK_BYTES = 1 << 20
"""Payload of a full frame: below 256 KiB the cost of a gRPC message dominates, above some MiB copies do not overlap."""
JOINED_BYTES = 64 << 10
"""Frames up to this size are sent together if several wait: a message costs more than their copy."""
MAXIMUM_TEXT_BYTES = 4096


class FrameKind(enum.IntEnum):
    """The kinds of frames.

    The ``sequence`` of a ``CREDIT`` is the number of micro-batches consumed so far, so the latest credit replaces
    earlier ones. Its payload is written by `credit_frame`. ``READY``: the receiver's GPU accepts, by NCCL, the tensor
    that was announced last.
    """

    CHOICE = 1
    ACCEPT = 2
    TENSOR = 3
    CREDIT = 4
    ERROR = 5
    HEARTBEAT = 6
    READY = 7


class FrameFlag(enum.IntFlag):
    """Flags of a frame of kind ``TENSOR``.

    ``WAITED``: the sender had the tensor before it had the credit to send it. ``SHARED``: the whole tensor is in memory
    that both ends share. The frame has no payload, and its offset is the slot's number.
    """

    NONE = 0
    WAITED = 1
    SHARED = 2


_KINDS = {int(kind): kind for kind in FrameKind}
_FLAGS = tuple(map(FrameFlag, range(3)))  # faster: an enum look-up takes as long as the rest of decode


class Frame(NamedTuple):
    kind: FrameKind
    flags: FrameFlag
    tensor: int
    sequence: int
    offset: int
    total: int
    payload: memoryview

    @property
    def is_shared(self) -> bool:
        return self.flags == FrameFlag.SHARED


def control_frame(kind: FrameKind, payload: bytes = b"", *, tensor: int = 0, sequence: int = 0) -> bytes:
    """Return a frame that carries no tensor."""
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, 0, tensor, 0, sequence, 0, len(payload)) + payload


def credit_frame(tensor: int, consumed: int, depth: int, slots: Sequence[int] = ()) -> bytes:
    """Return a credit: ``consumed`` micro-batches of a tensor so far, and ``depth`` may be in flight.

    ``slots`` are the slots in shared memory that are free again.
    """
    payload = struct.pack(f"<{1 + len(slots)}I", depth, *slots)
    return control_frame(FrameKind.CREDIT, payload, tensor=tensor, sequence=consumed)


def credit_of(frame: Frame) -> tuple[int, tuple[int, ...]]:
    """Return the depth that a credit grants, and the slots that it frees.

    Raises:
        ProtocolError: the payload has no depth, or its length is not a multiple of 4 bytes.
    """
    numbers, rest = divmod(len(frame.payload), 4)
    if rest or not numbers:
        raise ProtocolError(f"a credit has 4 bytes for its depth and for each slot, got {len(frame.payload)}")
    depth, *slots = struct.unpack(f"<{numbers}I", frame.payload)
    return depth, tuple(slots)


def parsed(kind: Callable[[], AnyMessage], frame: Frame) -> AnyMessage:
    """Return the protobuf message in a frame's payload, with its texts cleaned.

    Raises:
        ProtocolError: the payload cannot be parsed as a message of that kind.
    """
    message = kind()
    try:
        message.ParseFromString(bytes(frame.payload))
    except DecodeError as error:
        raise ProtocolError(f"a {frame.kind.name} frame has an invalid payload: {error}") from error
    return clean_message(message)


def error_frame(message: str) -> bytes:
    return control_frame(FrameKind.ERROR, message.encode()[:MAXIMUM_TEXT_BYTES])


def error_text(frame: Frame) -> str:
    return cleaned(bytes(frame.payload[:MAXIMUM_TEXT_BYTES]).decode(errors="replace"))


def tensor_frames(tensor: int, sequence: int, data: Bytes, flags: FrameFlag = FrameFlag.NONE) -> Iterator[bytes]:
    """Yield the frames of one tensor, at least one; ``data`` is its encoded content as a flat array of bytes."""
    total = data.size
    for offset in range(0, max(total, 1), CHUNK_BYTES):
        header = HEADER.pack(MAGIC, PROTOCOL_VERSION, FrameKind.TENSOR, flags, tensor, 0, sequence, offset, total)
        yield b"".join((header, data[offset : offset + CHUNK_BYTES].data))


def shared_tensor_frame(tensor: int, sequence: int, slot: int, total: int) -> bytes:
    """Return the frame that announces a tensor in shared memory, in the slot with the number ``slot``."""
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, FrameKind.TENSOR, FrameFlag.SHARED, tensor, 0, sequence, slot, total)


def joined(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the frames in order, successive small ones together in one message."""
    for is_small, group in groupby(frames, lambda frame: len(frame) <= JOINED_BYTES):
        if is_small:
            yield b"".join(group)
        else:
            yield from group


def frames_of(message: bytes | memoryview) -> Iterator[Frame]:
    """Yield the frames in a message; raises as `decode`."""
    rest = memoryview(message)
    while True:
        size = len(rest)
        if size > HEADER.size:
            _, _, kind, flags, *_, offset, total = HEADER.unpack_from(rest)
            payload = min(CHUNK_BYTES, total - offset) if kind == FrameKind.TENSOR else total
            size = min(size, HEADER.size + (0 if flags == FrameFlag.SHARED else max(0, payload)))
        yield decode(rest[:size])
        rest = rest[size:]
        if not rest:
            return


def decode(message: bytes | memoryview) -> Frame:
    """Return the frame in a message.

    Raises:
        ProtocolError: the message is not a valid frame of this protocol version.
    """
    if len(message) < HEADER.size:
        raise ProtocolError(f"a frame has at least {HEADER.size} bytes, got {len(message)}")
    magic, version, kind, flags, tensor, _, sequence, offset, total = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ProtocolError(f"a frame begins with {MAGIC!r}, got {magic!r}")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"this side speaks protocol version {PROTOCOL_VERSION}, the peer {version}: upgrade one")
    frame_kind = _KINDS.get(kind)
    if frame_kind is None:
        raise ProtocolError(f"unknown kind of frame: {kind}")
    if flags > FrameFlag.SHARED or (flags and frame_kind is not FrameKind.TENSOR):
        raise ProtocolError(f"a {frame_kind.name} frame has the flags {flags:#x}, which it cannot have")
    payload = memoryview(message)[HEADER.size :]
    if flags == FrameFlag.SHARED:
        if len(payload):
            raise ProtocolError(f"a frame for a tensor in shared memory has no payload, got {len(payload)} bytes")
        return Frame(frame_kind, FrameFlag.SHARED, tensor, sequence, offset, total, payload)
    if offset + len(payload) > total:
        raise ProtocolError(f"a frame's payload ends at byte {offset + len(payload)} of a tensor of {total} bytes")
    if frame_kind is not FrameKind.TENSOR and (offset != 0 or len(payload) != total):
        raise ProtocolError(f"a {frame_kind.name} frame announces {total} bytes and carries {len(payload)}")
    if frame_kind is FrameKind.TENSOR and (offset % CHUNK_BYTES or len(payload) != min(CHUNK_BYTES, total - offset)):
        raise ProtocolError(
            f"a TENSOR frame carries {CHUNK_BYTES} bytes, or what is left of its tensor; got {len(payload)} from byte "
            f"{offset} of {total}"
        )
    return Frame(frame_kind, _FLAGS[flags], tensor, sequence, offset, total, payload)
