"""Both ends of a link, joined without a network: order, credits, and peers that violate the protocol."""

from typing import Any

import numpy as np
import pytest

from rpc_runtime.client.result_queue import array_slot
from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.program.codecs import CODECS
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.carrier import Carrier, OnEnd, Slot
from rpc_runtime.transports.credits import MOST_MORE
from rpc_runtime.transports.links import OutgoingLink
from rpc_runtime.wire.framing import (
    CHUNK_BYTES,
    HEADER,
    MAGIC,
    PROTOCOL_VERSION,
    FrameFlag,
    FrameKind,
    control_frame,
    credit_frame,
    decode,
    tensor_frames,
)
from tests.helpers.rpc_runtime.joined_links import Idle, Receiver


def route(index: int, name: str, elements: int = 4, depth: int = 2) -> Route:
    return Route(index, TensorSpec(name, (elements,), "uint8"), "a", "b", depth)


def receiver_of(*routes: Route) -> Receiver:
    return Receiver(routes, holds=True)


def take(receiver: Receiver, *messages: bytes) -> None:
    for message in messages:
        receiver.link.receive(decode(message))


def bytes_of(value: int, elements: int = 4) -> np.ndarray:
    return np.full(elements, value, np.uint8)


def test_the_sender_stops_without_credit_and_the_other_tensor_goes_on() -> None:
    owner = Idle()
    link = OutgoingLink(owner, [route(0, "slow", depth=1), route(1, "fast", depth=3)], flat_bytes, array_slot)
    frames = link.frames()
    with owner.lock:
        link.put_locked("slow", 0, bytes_of(0))
        link.put_locked("slow", 1, bytes_of(1))
        assert not link.has_room_locked("slow")
        link.put_locked("fast", 1, bytes_of(2))
    sent = [decode(next(frames)) for _ in range(2)]
    assert [(f.tensor, f.sequence, f.flags) for f in sent] == [(0, 0, FrameFlag.NONE), (1, 1, FrameFlag.NONE)]
    link.receive(decode(credit_frame(0, 1, 1)))
    last = decode(next(frames))
    assert (last.tensor, last.flags, link.has_room_locked("fast")) == (0, FrameFlag.WAITED, True)
    link.close()
    assert list(frames) == []


@pytest.mark.parametrize(
    "frame",
    [
        credit_frame(9, 0, 2),
        credit_frame(0, 1, 2),
        credit_frame(0, 2**63, 2),
        credit_frame(0, 0, 1),
        credit_frame(0, 0, 2 + MOST_MORE + 1),
        control_frame(FrameKind.CREDIT),
    ],
    ids=["unknown tensor", "never sent", "huge", "narrower", "too wide", "no depth"],
)
def test_credits_that_nobody_could_grant_are_refused(frame: bytes) -> None:
    link = OutgoingLink(Idle(), [route(0, "t")], flat_bytes, array_slot)
    with pytest.raises(ProtocolError):
        link.receive(decode(frame))


def test_a_window_grows_where_its_owner_waits_for_another_tensor() -> None:
    receiver = receiver_of(route(0, "t"))
    credits = receiver.link.frames()
    take(receiver, *tensor_frames(0, 0, bytes_of(0)))
    receiver.starving = True
    take(receiver, *tensor_frames(0, 1, bytes_of(1), FrameFlag.WAITED))
    assert next(credits) == credit_frame(0, consumed=0, depth=3)


def test_a_peer_without_credit_is_refused() -> None:
    receiver = receiver_of(route(0, "t", depth=2))
    with pytest.raises(ProtocolError, match="without a credit"):
        take(receiver, *(frame for n in range(3) for frame in tensor_frames(0, n, bytes_of(n))))
    assert len(receiver.got) == 2


@pytest.mark.parametrize("codec", [*CODECS])
def test_sizes_that_a_codec_cannot_make_are_refused(codec: str) -> None:
    tensor = TensorSpec("cut", (4, 4), "float32")
    for size in (0, 7, 65, 1 << 40) if CODECS[codec].is_lossy else (0, 65, 1 << 40):
        header = HEADER.pack(MAGIC, PROTOCOL_VERSION, FrameKind.TENSOR, 0, 0, 0, 0, 0, size)
        with pytest.raises(ProtocolError, match="cut"):
            take(receiver_of(Route(0, tensor, "a", "b", 3, codec=codec)), header + bytes(min(size, CHUNK_BYTES)))


class Failing(Slot):
    """A slot whose copies fail."""

    def copy_in(self, value: Any) -> None:
        raise WorkerError("the GPU fails: cudaEventSynchronize: an illegal memory access was encountered")


class Slots(Carrier):
    """A carrier with one slot for a tensor; the test reads the frames to send."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def slots(self, route: Route) -> list[Slot]:
        return [self._slot]

    def start(self, on_end: OnEnd) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("by_frames", [True, False])
def test_a_copy_that_fails_is_told_to_the_carrier_and_nothing_is_sent(by_frames: bool) -> None:
    owner, sent = Idle(), list[bytes]()
    link = OutgoingLink(owner, [route(0, "t", depth=1)], flat_bytes, array_slot)
    link.open(Slots(Failing(np.empty(0, np.uint8), None)))
    with owner.lock:
        link.put_locked("t", 0, bytes_of(1))
    with pytest.raises(WorkerError, match="an illegal memory access"):
        sent += link.frames() if by_frames else link.drain(sent.append) or ()
    assert sent == []
