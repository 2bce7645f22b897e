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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.transports.link_end import BEAT_SECONDS, HEARTBEAT, SILENCE_SECONDS, LinkEnd
from rpc_runtime.transports.links import IncomingLink
from rpc_runtime.transports.nccl_device import UNIQUE_ID_BYTES, Nccl, version_text
from rpc_runtime.transports.slots import NOT_OF_THE_HOST, Slot
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.framing import CHUNK_BYTES, Frame, FrameKind, control_frame

logger = logging.getLogger(__name__)

JOIN_SECONDS = 60.0
STALL_SECONDS = 30.0
"""So long, and what the slowest link takes that is meant to work, may a transfer when both ends have begun it; the
first one connects."""
SLOWEST_BYTES_PER_SECOND = CHUNK_BYTES / SILENCE_SECONDS
TURN_SECONDS = 300.0
GRACE_SECONDS = 1.0
"""So long may what is under way still take when a link is closed: as a rule the other end lives."""
ABORT_SECONDS = 2.0
REST_SECONDS = 100e-6


class NcclTransfers:
    """Those of one end of ``link``, of which the ``other`` end has said so much; the called end makes the unique id.

    Life: made, `join`, `begin`, `receive` for what comes, `close`.

    Raises:
        ProtocolError: the caller has got something else than a unique id.
        WorkerError: the two cannot be joined, or the GPU has no memory for the link's places.
    """

    def __init__(self, link: LinkEnd, nccl: Nccl, other: pb.NcclEnd, *, calls: bool) -> None:
        _require_fit(nccl, other)
        if calls and len(other.unique_id) != UNIQUE_ID_BYTES:
            raise ProtocolError(f"a unique id of NCCL has {UNIQUE_ID_BYTES} bytes, got {len(other.unique_id)}")
        self._link, self._nccl = link, nccl
        self._is_first = nccl.gpu < other.gpu
        self._slots = {
            (route.index, number): self._slot(route.tensor) for route in link.routes for number in range(route.depth)
        }
        unique_id = other.unique_id if calls else nccl.unique_id()
        self.own = pb.NcclEnd(version=nccl.version, gpu=nccl.gpu, unique_id=unique_id)
        """What the caller joins this end by."""
        self._communicator = nccl.communicator(unique_id, int(calls))
        self._joined = threading.Event()
        self._at_work = threading.Lock()
        self._has_turn = False
        self._latest = math.inf
        self._closer = threading.Thread(target=self._end, name="nccl-end", daemon=True)

    def join(self, is_wanted: Callable[[], bool]) -> bool:
        """Whether both ends have; not if that is no longer wanted.

        Raises:
            WorkerUnavailableError: NCCL fails, or the other end does not come.
        """
        advice = "for the other end to join: can the hosts reach each other as NCCL_SOCKET_IFNAME says?"
        for _ in self._until(lambda: not is_wanted() or self._communicator.is_ready(), JOIN_SECONDS, advice):
            pass
        if is_wanted():
            self._joined.set()
        return self._joined.is_set()

    def begin(self) -> None:
        """Tensors go this way from now on.

        Raises:
            WorkerUnavailableError: this end has not joined.
        """
        for _ in self._until(self._joined.is_set, JOIN_SECONDS, "to join"):
            pass
        self._link.carry(None, lambda route, number: self._slots[route.index, number])

    def receive(self, frame: Frame) -> None:
        """Takes what the other end says in the stream. For one thread.

        Raises:
            ProtocolError: it is not what may come next.
        """
        self._link.receive(frame)

    def close(self) -> None:
        """Ends all. Returns when the communicator is no more, or after a while; then what it uses stays. May be called
        again."""
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
        yield from self._until(take, TURN_SECONDS, "for other transfers of its GPU")
        self._has_turn = True

    def _transferred(self, size_bytes: int) -> Iterator[bytes]:
        """Waits for what was begun, and ends the turn."""
        seconds = size_bytes / SLOWEST_BYTES_PER_SECOND + (TURN_SECONDS if self._is_first else STALL_SECONDS)
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
                if here - said > BEAT_SECONDS:
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


class _Sending(NcclTransfers):
    def __init__(self, link: LinkEnd, nccl: Nccl, other: pb.NcclEnd, *, calls: bool) -> None:
        super().__init__(link, nccl, other, calls=calls)
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
                yield from self._until(lambda: not self._awaits_ready, TURN_SECONDS, "for the receiver")
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


class _Receiving(NcclTransfers):
    """Tensors of which it was told are received in a thread of its own, one after the other: who reads the stream does
    not wait for them. ``on_end(error)`` is called if that fails."""

    def __init__(
        self, link: IncomingLink, nccl: Nccl, other: pb.NcclEnd, on_end: Callable[[TvmSplitError], None], *, calls: bool
    ) -> None:
        super().__init__(link, nccl, other, calls=calls)
        self._say, self._on_end = link.say, on_end
        self._announced: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._take, name="nccl", daemon=True)

    def begin(self) -> None:
        super().begin()
        self._thread.start()

    def receive(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.TENSOR:
            super().receive(frame)
        elif self._announced.qsize() < len(self._slots):
            self._announced.put(frame)
        elif self._latest == math.inf:
            raise ProtocolError(f"the link has {len(self._slots)} places, and more tensors were announced")

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
                self._say(control_frame(FrameKind.READY))
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


def nccl_transfers(
    link: LinkEnd, nccl: Nccl, other: pb.NcclEnd, on_end: Callable[[TvmSplitError], None], *, calls: bool
) -> NcclTransfers:
    """Of either end. ``on_end(error)`` is called when a tensor cannot be received; sending one raises."""
    if isinstance(link, IncomingLink):
        return _Receiving(link, nccl, other, on_end, calls=calls)
    return _Sending(link, nccl, other, calls=calls)


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

    def fetch(self) -> None:
        if self.size_bytes:
            self.transfers.fetch(self.address, self.size_bytes)


def _require_fit(own: Nccl, other: pb.NcclEnd) -> None:
    if own.version != other.version:
        raise WorkerError(
            f"both ends need the same NCCL, this one has {version_text(own.version)}, the other one "
            f"{version_text(other.version)}"
        )
    if own.gpu == other.gpu:
        raise WorkerError("both ends are on the same GPU, and NCCL needs one for each")


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    """What NCCL fails with is told as a link's failure."""
    try:
        yield
    except WorkerUnavailableError:
        raise
    except WorkerError as error:
        raise WorkerUnavailableError(str(error)) from error
