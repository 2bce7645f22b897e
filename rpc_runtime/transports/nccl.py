"""Brings the tensors of a link from GPU to GPU, of one host or of two, by NCCL. All else of it stays in its stream.

    caller ── Hello: its NCCL, its GPU ──▶ worker
    caller ◀── ACCEPT: the worker's, and a unique id ── worker      both join a communicator, of this link alone
    caller ── CHOICE ──▶ worker
    sender ── "tensor 3, micro-batch 17, place 2" ──▶ receiver      ncclSend, and ncclRecv into place 2
    receiver ── "consumed up to 15, place 0 is free" ──▶ sender

What NCCL has begun is on its GPU until the other end has begun it, too, and whoever waits for all of a GPU (to free
memory, to lock pages) waits for that. With two under way, two GPUs can so wait for each other for ever. Therefore each
process has one turn, and a transfer takes that of both ends: first that of the GPU whose name comes first, of all in
the world, so that those who wait for turns never form a circle.

    sender first      sender's turn ▸ ncclSend ▸ header ──▶ receiver's turn ▸ ncclRecv
    receiver first    header ──▶ receiver's turn ▸ ncclRecv ▸ READY ──▶ sender's turn ▸ ncclSend

A tensor is handed on when it is there: nothing is computed behind what may never come. The memory of both ends stays
until the transfer has ended, or its communicator.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.transports.link_end import HEARTBEAT
from rpc_runtime.transports.nccl_device import UNIQUE_ID_BYTES, NcclDevice, nccl_of, version_text
from rpc_runtime.transports.slots import NOT_OF_THE_HOST, Slot
from rpc_runtime.transports.transport import Carrier, OnEnd, Opening, Pending, Transport, Unusable
from rpc_runtime.wire.framing import CHUNK_BYTES, Frame, FrameKind, control_frame

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_SECOND = CHUNK_BYTES / 4
GRACE_SECONDS = 1.0
"""So long may what is under way still take when a link is closed: as a rule the other end lives."""
ABORT_SECONDS = 2.0
REST_SECONDS = 100e-6


_END = struct.Struct(f"<I{UNIQUE_ID_BYTES}s")


@dataclass(frozen=True)
class NcclEnd:
    """What joins one end of a link to the other: the version of the library (22703 is 2.27.3), a name of the GPU that
    no other one has, and the communicator's unique id, which the worker makes."""

    version: int
    gpu: str
    unique_id: bytes = bytes(UNIQUE_ID_BYTES)

    def to_bytes(self) -> bytes:
        return _END.pack(self.version, self.unique_id) + self.gpu.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> NcclEnd:
        """Raises a `ProtocolError` where the content is none."""
        if len(content) < _END.size:
            raise ProtocolError(f"what joins a link by NCCL has at least {_END.size} bytes, got {len(content)}")
        version, unique_id = _END.unpack_from(content)
        return cls(version, content[_END.size :].decode(errors="replace"), unique_id)


@dataclass(frozen=True)
class NcclTimeouts:
    """How long the two ends of a link wait for each other and for NCCL.

    Args:
        join_seconds: both ends have joined the communicator.
        stall_seconds: a transfer that both ends have begun has ended, beyond what the slowest link takes for it; the
            first one connects.
        turn_seconds: other transfers of the GPU have ended.
    """

    join_seconds: float = 60.0
    stall_seconds: float = 30.0
    turn_seconds: float = 300.0


class Nccl(Transport):
    """Joins processes with a GPU each. An offer is the caller's `NcclEnd`, an answer the worker's."""

    name = "nccl"
    title = "NCCL"
    memory = "device"
    uses_codecs = False
    joins_client = False
    connect_seconds = NcclTimeouts().join_seconds

    def __init__(self, timeouts: NcclTimeouts | None = None) -> None:
        self._timeouts = timeouts or NcclTimeouts()

    def offer(self, opening: Opening) -> bytes:
        own = nccl_of(opening.link.nccl)
        return NcclEnd(own.version, own.gpu).to_bytes()

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        carrier = self._carrier(opening, NcclEnd.from_bytes(offer), calls=False)
        return carrier.own.to_bytes(), _NcclPending(carrier)

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        carrier = self._carrier(opening, NcclEnd.from_bytes(answer), calls=True)
        try:
            carrier.join()
        except BaseException:
            carrier.close()
            raise
        return carrier

    def _carrier(self, opening: Opening, other: NcclEnd, *, calls: bool) -> NcclCarrier:
        own, kind = nccl_of(opening.link.nccl), _Receiving if opening.link.receives else _Sending
        return kind(opening, own, other, self._timeouts, calls=calls)


class _NcclPending:
    def __init__(self, carrier: NcclCarrier) -> None:
        self._carrier = carrier

    def accept(self) -> Carrier:
        self._carrier.join()
        return self._carrier

    def close(self) -> None:
        self._carrier.close()


class NcclCarrier(Carrier):
    """Carries one end of a link: tensors by NCCL, all else over the stream. The called end makes the unique id.

    Raises:
        WorkerError: the two cannot be joined, or the GPU has no memory for the link's slots.
    """

    def __init__(
        self, opening: Opening, nccl: NcclDevice, other: NcclEnd, timeouts: NcclTimeouts, *, calls: bool
    ) -> None:
        _require_fit(nccl, other)
        self._link, self._stream, self._nccl, self._timeouts = opening.link, opening.stream, nccl, timeouts
        self._is_first = nccl.gpu < other.gpu
        self._slots = {
            route.index: [self._slot(route.tensor) for _ in range(route.depth)] for route in self._link.routes
        }
        unique_id = other.unique_id if calls else nccl.unique_id()
        self.own = NcclEnd(nccl.version, nccl.gpu, unique_id)
        """What the caller joins this end by."""
        self._communicator = nccl.communicator(unique_id, int(calls))
        self._at_work = threading.Lock()
        self._has_turn = False
        self._latest = math.inf
        self._closer = threading.Thread(target=self._end, name="nccl-end", daemon=True)

    def join(self) -> None:
        """Returns when both ends have joined the communicator.

        Raises:
            WorkerUnavailableError: NCCL fails, the other end does not come in time, or has gone.
        """
        advice = "for the other end to join: can the hosts reach each other as NCCL_SOCKET_IFNAME says?"
        for _ in self._until(self._is_joined, self._timeouts.join_seconds, advice):
            pass

    def _is_joined(self) -> bool:
        if not self._stream.is_alive():
            raise WorkerUnavailableError("the other end has gone")
        return self._communicator.is_ready()

    def slots(self, route: Route) -> Sequence[Slot]:
        return self._slots[route.index]

    def start(self, on_end: OnEnd) -> None:
        self._link.open(self)
        self._stream.carry(self.receive)

    def receive(self, frame: Frame) -> None:
        """Takes what the other end says in the stream. For one thread.

        Raises:
            ProtocolError: it is not what may come next.
        """
        self._link.receive(frame)

    def close(self) -> None:
        """Returns when the communicator is no more, or after a while; then what it uses stays."""
        with contextlib.suppress(RuntimeError):  # it was started
            self._closer.start()
        self._closer.join(2 * GRACE_SECONDS + ABORT_SECONDS)
        if self._closer.is_alive():
            logger.warning("NCCL is still ending a communicator, and transfers of its GPU wait for that")

    def _slot(self, tensor: TensorSpec) -> Slot:
        raise NotImplementedError

    def _turn(self) -> Iterator[bytes]:
        """Takes it, for one transfer."""
        take = partial(self._nccl.turn.acquire, blocking=False)
        yield from self._until(take, self._timeouts.turn_seconds, "for other transfers of its GPU")
        self._has_turn = True

    def _transferred(self, size_bytes: int) -> Iterator[bytes]:
        """Waits for what was begun, and ends the turn."""
        waits = self._timeouts.turn_seconds if self._is_first else self._timeouts.stall_seconds
        seconds = size_bytes / SLOWEST_BYTES_PER_SECOND + waits
        yield from self._until(self._communicator.is_done, seconds, f"for {size_bytes} bytes to pass")
        self._end_turn()

    def _end_turn(self) -> None:
        self._has_turn = False
        self._nccl.turn.release()

    def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> Iterator[bytes]:
        """Waits until it is; says once in a beat that this end is there.

        Raises:
            WorkerUnavailableError: it is not in time, NCCL has failed, or this is closed.
        """
        said = begin = time.monotonic()
        with _as_unavailable():
            while True:
                here = time.monotonic()
                if here > self._latest:
                    raise WorkerUnavailableError("the link was closed")
                if is_so():
                    return
                if here - begin > seconds:
                    raise WorkerUnavailableError(f"this end has waited {seconds:.0f} seconds {what}")
                if here - said > self._link.timeouts.beat_seconds:
                    said = here
                    yield HEARTBEAT
                time.sleep(REST_SECONDS)

    def _end(self) -> None:
        self._latest = time.monotonic() + GRACE_SECONDS
        is_at_rest = self._at_work.acquire(timeout=2 * GRACE_SECONDS)
        try:
            self._communicator.abort()
        except WorkerError as error:
            logger.warning("a communicator is not ended, and keeps what it uses: %s", error)
            return
        if is_at_rest or self._at_work.acquire(timeout=2 * GRACE_SECONDS):
            self._latest = -math.inf
            self._forget()
            if self._has_turn:
                self._end_turn()
            self._at_work.release()

    def _forget(self) -> None:
        """Lets go of memory."""
        self._slots.clear()


class _Sending(NcclCarrier):
    def __init__(
        self, opening: Opening, nccl: NcclDevice, other: NcclEnd, timeouts: NcclTimeouts, *, calls: bool
    ) -> None:
        super().__init__(opening, nccl, other, timeouts, calls=calls)
        self._awaits_ready = False
        self._kept: Any = None

    def receive(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.READY:
            super().receive(frame)
        elif self._awaits_ready:
            self._awaits_ready = False
        else:
            raise ProtocolError("the receiver is ready for a tensor of which it was not told")

    def send(self, value: Any, size_bytes: int, header: bytes) -> Iterator[bytes]:
        """As `Slot.send`.

        Raises:
            WorkerUnavailableError: it fails, takes too long, or this was closed.
        """
        with self._at_work, _as_unavailable():
            self._kept = value
            if not self._is_first:
                self._awaits_ready = True
                yield header
                yield from self._until(lambda: not self._awaits_ready, self._timeouts.turn_seconds, "for the receiver")
            yield from self._turn()
            self._communicator.send(self._nccl.address(value), size_bytes)
            if self._is_first:
                yield header
            yield from self._transferred(size_bytes)
            self._kept = None

    def _slot(self, tensor: TensorSpec) -> Slot:
        return _Way(NOT_OF_THE_HOST, None, self, tensor.size_bytes)

    def _forget(self) -> None:
        super()._forget()
        self._kept = None


class _Receiving(NcclCarrier):
    """Tensors of which it was told are received in a thread of its own, one after the other: the thread that reads the
    stream does not wait for them. ``on_end(error)`` is called if that fails."""

    def __init__(
        self, opening: Opening, nccl: NcclDevice, other: NcclEnd, timeouts: NcclTimeouts, *, calls: bool
    ) -> None:
        super().__init__(opening, nccl, other, timeouts, calls=calls)
        self._most = sum(map(len, self._slots.values()))
        self._announced: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._take, name="nccl", daemon=True)

    def start(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        super().start(on_end)
        self._thread.start()

    def receive(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.TENSOR:
            super().receive(frame)
        elif self._announced.qsize() < self._most:
            self._announced.put(frame)
        elif self._latest == math.inf:
            raise ProtocolError(f"the link has {self._most} slots, and more tensors were announced")

    def close(self) -> None:
        self._announced.put(None)
        super().close()

    def fetch(self, address: int, size_bytes: int) -> None:
        """Receives what was announced last.

        Raises:
            WorkerUnavailableError: it fails, takes too long, or this was closed.
        """
        with self._at_work:
            for _ in self._turn():
                pass
            self._communicator.receive(address, size_bytes)
            if self._is_first:
                self._link.say(control_frame(FrameKind.READY))
            for _ in self._transferred(size_bytes):
                pass

    def _slot(self, tensor: TensorSpec) -> Slot:
        address, value = self._nccl.memory(tensor)
        return _Place(NOT_OF_THE_HOST, value, self, tensor.size_bytes, address)

    def _take(self) -> None:
        try:
            with _as_unavailable():
                while (frame := self._announced.get()) is not None:
                    self._link.receive(frame)
        except TvmSplitError as error:
            self._on_end(error)
        except Exception as unexpected:
            self._on_end(WorkerError(f"{unexpected!r}"))


@dataclass(frozen=True, slots=True)
class _Way(Slot):
    transfers: _Sending
    size_bytes: int

    def send(self, value: Any, header: bytes) -> Iterator[bytes]:
        return self.transfers.send(value, self.size_bytes, header) if self.size_bytes else iter((header,))


@dataclass(frozen=True, slots=True)
class _Place(Slot):
    transfers: _Receiving
    size_bytes: int
    address: int

    def wait(self) -> None:
        if self.size_bytes:
            self.transfers.fetch(self.address, self.size_bytes)


def _require_fit(own: NcclDevice, other: NcclEnd) -> None:
    if own.version != other.version:
        raise Unusable(
            f"both ends need the same NCCL, this one has {version_text(own.version)}, the other one "
            f"{version_text(other.version)}"
        )
    if own.gpu == other.gpu:
        raise Unusable("both ends are on the same GPU, and NCCL needs one for each")


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    """What NCCL fails with is told as a link's failure."""
    try:
        yield
    except WorkerUnavailableError:
        raise
    except WorkerError as error:
        raise WorkerUnavailableError(str(error)) from error
