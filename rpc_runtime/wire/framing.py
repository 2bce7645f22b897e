"""How tensors look on the wire: one gRPC message of raw bytes is one frame, a fixed little-endian header and a payload.

=========  =========  ==============================================================================================
field      bytes      meaning
=========  =========  ==============================================================================================
magic      4          ``b"TVMS"``
version    1          ``PROTOCOL_VERSION``
kind       1          :class:`FrameKind`
flags      2          :class:`FrameFlag`, 0 but in frames of kind ``TENSOR``
tensor     4          index of the tensor in the deployment's table of routes
epoch      4          of the link: 0
sequence   8          number of the micro-batch, from 0
offset     8          where the payload begins in what was written of the tensor, in bytes
total      8          size of the whole tensor as its route's codec has written it, in bytes
=========  =========  ==============================================================================================

A tensor larger than ``CHUNK_BYTES`` travels as several frames of so many bytes and one of the rest, in order and not
interleaved with other tensors of the same stream. Less is no progress, so that nobody is kept waiting byte by byte.
Nothing here trusts a peer: what does not fit raises :class:`ProtocolError`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.runner import Bytes
from rpc_runtime.wire.foreign_text import AnyMessage, clean_message, cleaned

PROTOCOL_VERSION = 10
MAGIC = b"TVMS"
HEADER = struct.Struct("<4sBBHIIQQQ")
CHUNK_BYTES = 1 << 20
"""Below 256 KiB the cost of a gRPC message dominates; above some MiB the copies no longer overlap."""
MAXIMUM_TEXT_BYTES = 4096


class FrameKind(enum.IntEnum):
    """What a frame says. ``sequence`` of a credit counts the micro-batches consumed so far, so the last one counts; its
    payload is how many may be under way, as `credit_frame` packs it. ``READY``: the receiver's GPU takes the tensor of
    which it was told last, by NCCL."""

    CHOICE = 1
    ACCEPT = 2
    TENSOR = 3
    CREDIT = 4
    ERROR = 5
    HEARTBEAT = 6
    READY = 7


class FrameFlag(enum.IntFlag):
    """What else a frame with a tensor says.

    ``WAITED``: its sender had the tensor before it had the credit for it. ``SHARED``: the tensor, whole, lies in memory
    that both ends see; the frame has no payload, and its offset is the number of the place.
    """

    NONE = 0
    WAITED = 1
    SHARED = 2


_KINDS = {int(kind): kind for kind in FrameKind}
_FLAGS = (FrameFlag.NONE, FrameFlag.WAITED, FrameFlag.SHARED)  # an enumeration's own look-up takes as long as the rest


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
    """One frame that carries no tensor."""
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, 0, tensor, 0, sequence, 0, len(payload)) + payload


def credit_frame(tensor: int, consumed: int, depth: int, places: Sequence[int] = ()) -> bytes:
    """So many micro-batches of a tensor were consumed; ``depth`` of them may be under way, in shared memory in these
    places, which are free again."""
    payload = struct.pack(f"<{1 + len(places)}I", depth, *places)
    return control_frame(FrameKind.CREDIT, payload, tensor=tensor, sequence=consumed)


def credit_of(frame: Frame) -> tuple[int, tuple[int, ...]]:
    """The depth that a credit grants, and the places that it frees.

    Raises:
        ProtocolError: it has no depth.
    """
    numbers, rest = divmod(len(frame.payload), 4)
    if rest or not numbers:
        raise ProtocolError(f"a credit has 4 bytes for its depth and for each place, got {len(frame.payload)}")
    depth, *places = struct.unpack(f"<{numbers}I", frame.payload)
    return depth, tuple(places)


def parsed(kind: Callable[[], AnyMessage], frame: Frame) -> AnyMessage:
    """The message in a frame's payload.

    Raises:
        ProtocolError: there is none of that kind.
    """
    message = kind()
    try:
        message.ParseFromString(bytes(frame.payload))
    except DecodeError as error:
        raise ProtocolError(f"a {frame.kind.name} frame carries something else: {error}") from error
    return clean_message(message)


def error_frame(message: str) -> bytes:
    return control_frame(FrameKind.ERROR, message.encode()[:MAXIMUM_TEXT_BYTES])


def error_text(frame: Frame) -> str:
    return cleaned(bytes(frame.payload[:MAXIMUM_TEXT_BYTES]).decode(errors="replace"))


def tensor_frames(tensor: int, sequence: int, data: Bytes, flags: FrameFlag = FrameFlag.NONE) -> Iterator[bytes]:
    """The frames of one tensor; ``data`` is its content as a flat array of bytes. An empty tensor is one frame."""
    total = data.size
    for offset in range(0, max(total, 1), CHUNK_BYTES):
        header = HEADER.pack(MAGIC, PROTOCOL_VERSION, FrameKind.TENSOR, flags, tensor, 0, sequence, offset, total)
        yield b"".join((header, data[offset : offset + CHUNK_BYTES].data))


def shared_tensor_frame(tensor: int, sequence: int, place: int, total: int) -> bytes:
    """Word of a tensor that lies in memory which both ends see, in the place with this number."""
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, FrameKind.TENSOR, FrameFlag.SHARED, tensor, 0, sequence, place, total)


def decode(message: bytes | memoryview) -> Frame:
    """The frame in a message.

    Raises:
        ProtocolError: the message is no frame of this version of the protocol.
    """
    if len(message) < HEADER.size:
        raise ProtocolError(f"a frame has at least {HEADER.size} bytes, got {len(message)}")
    magic, version, kind, flags, tensor, _, sequence, offset, total = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ProtocolError(f"a frame begins with {MAGIC!r}, got {magic!r}")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"this side speaks protocol version {PROTOCOL_VERSION}, the peer {version}: upgrade one")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"unknown kind of frame: {kind}")
    if flags > FrameFlag.SHARED or (flags and known is not FrameKind.TENSOR):
        raise ProtocolError(f"a {known.name} frame has the flags {flags:#x}, which it cannot have")
    payload = memoryview(message)[HEADER.size :]
    if flags == FrameFlag.SHARED:
        if len(payload):
            raise ProtocolError(f"word of a tensor in shared memory comes alone, this has {len(payload)} bytes with it")
        return Frame(known, FrameFlag.SHARED, tensor, sequence, offset, total, payload)
    if offset + len(payload) > total:
        raise ProtocolError(f"a frame's payload ends at byte {offset + len(payload)} of a tensor of {total} bytes")
    if known is not FrameKind.TENSOR and (offset != 0 or len(payload) != total):
        raise ProtocolError(f"a {known.name} frame announces {total} bytes and carries {len(payload)}")
    if known is FrameKind.TENSOR and (offset % CHUNK_BYTES or len(payload) != min(CHUNK_BYTES, total - offset)):
        raise ProtocolError(
            f"a TENSOR frame carries {CHUNK_BYTES} bytes, or what is left of its tensor; got {len(payload)} from byte "
            f"{offset} of {total}"
        )
    return Frame(known, _FLAGS[flags], tensor, sequence, offset, total, payload)
