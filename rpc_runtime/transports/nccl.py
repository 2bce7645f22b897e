"""The NCCL transport: sends tensors from GPU to GPU, on one host or two. All other frames stay in the gRPC stream.

    caller ── Hello: its NCCL version, its GPU ──▶ worker
    caller ◀── ACCEPT: the worker's, and a unique id ── worker      both join a communicator for this link only
    caller ── CHOICE ──▶ worker
    sender ── "tensor 3, micro-batch 17, slot 2" ──▶ receiver       ncclSend, and ncclRecv into slot 2
    receiver ── "consumed up to 15, slot 0 is free" ──▶ sender

An NCCL operation occupies its GPU until the other end has begun it, too. Calls that synchronize the whole device (to
free memory, to lock pages) wait for it. So with two operations in flight, two GPUs can deadlock. Therefore each process
has one ``transfer_lock``, and a transfer takes the locks of both ends. It takes first the lock of the GPU whose name is
smaller; this global lock order prevents deadlock.

    sender first      lock of sender ▸ ncclSend ▸ header ──▶ lock of receiver ▸ ncclRecv
    receiver first    header ──▶ lock of receiver ▸ ncclRecv ▸ READY ──▶ lock of sender ▸ ncclSend

A tensor is delivered after its transfer has ended: no kernel is queued behind a transfer that may never end. The memory
of both ends is kept until the transfer or its communicator has ended.
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

from rpc_runtime.errors import ProtocolError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.carrier import DEVICE_ONLY, Carrier, OnEnd, Pending, Slot, failure_of
from rpc_runtime.transports.link_end import HEARTBEAT, Device
from rpc_runtime.transports.nccl_calls import UNIQUE_ID_BYTES, CudaNccl, version_text
from rpc_runtime.transports.transport import Opening, Transport, Unusable
from rpc_runtime.wire.framing import CHUNK_BYTES, Frame, FrameKind, control_frame

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_SECOND = CHUNK_BYTES / 4
STALL_SECONDS = 30.0
"""Limit for a transfer that both ends have begun, plus its time on the slowest link; the first one also connects."""
QUEUE_SECONDS = 300.0
"""Limit for other transfers of the GPU to end."""
GRACE_SECONDS = 1.0
"""Time that a transfer in flight may still take when a link is closed; usually the other end is alive."""
ABORT_SECONDS = 2.0
REST_SECONDS = 100e-6
_END = struct.Struct(f"<I{UNIQUE_ID_BYTES}s")


@dataclass(frozen=True)
class NcclEnd:
    """Handshake data of one end: NCCL's version (22703 is 2.27.3), a globally unique name of the GPU, and the
    communicator's unique id, which the worker makes."""

    version: int
    gpu: str
    unique_id: bytes = bytes(UNIQUE_ID_BYTES)

    def to_bytes(self) -> bytes:
        return _END.pack(self.version, self.unique_id) + self.gpu.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> NcclEnd:
        """Return the end whose `to_bytes` is ``content``. Raises `ProtocolError` if the content is too short."""
        if len(content) < _END.size:
            raise ProtocolError(f"malformed NCCL offer: at least {_END.size} bytes expected, got {len(content)}")
        version, unique_id = _END.unpack_from(content)
        return cls(version, content[_END.size :].decode(errors="replace"), unique_id)


class Nccl(Transport):
    """Connects two processes with one GPU each, within ``connect_seconds``.

    An offer is the caller's `NcclEnd`, an answer the worker's.
    """

    name = "nccl"
    title = "NCCL"
    memory = "device"
    uses_codecs = False
    joins_client = False

    connect_seconds = 60.0

    def offer(self, opening: Opening) -> bytes:
        nccl = CudaNccl(_device_of(opening))
        return NcclEnd(nccl.version, nccl.gpu).to_bytes()

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        carrier = self._carrier(opening, NcclEnd.from_bytes(offer), calls=False)
        return carrier.own.to_bytes(), carrier

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        carrier = self._carrier(opening, NcclEnd.from_bytes(answer), calls=True)
        try:
            carrier.join()
        except BaseException:
            carrier.close()
            raise
        return carrier

    def _carrier(self, opening: Opening, peer: NcclEnd, *, calls: bool) -> NcclCarrier:
        kind = _Receiving if opening.link.receives else _Sending
        return kind(opening, _device_of(opening), peer, self.connect_seconds, calls=calls)


def _device_of(opening: Opening) -> Device:
    if (device := opening.link.owner.device) is None:
        raise WorkerError("its stages are on no GPU")
    return device


class NcclCarrier(Carrier):
    """Carries one end of a link: tensors by NCCL, other frames over the stream. The called end makes the unique id.

    Raises:
        WorkerError: the two ends cannot be connected, or the GPU has no memory for the link's slots.
    """

    _kept: Any = None
    """The value that is being sent: its memory must not be reused meanwhile."""

    def __init__(self, opening: Opening, device: Device, peer: NcclEnd, join_seconds: float, *, calls: bool) -> None:
        nccl = CudaNccl(device)
        _require_fit(nccl, peer)
        self._link, self._stream, self._device, self._join_seconds = opening.link, opening.stream, device, join_seconds
        self._is_first = nccl.gpu < peer.gpu
        self._slots = {
            route.index: [self._slot(route.tensor) for _ in range(route.depth)] for route in self._link.routes
        }
        unique_id = peer.unique_id if calls else nccl.unique_id()
        self.own = NcclEnd(nccl.version, nccl.gpu, unique_id)
        """The handshake data that the caller needs to join this end."""
        self._communicator = nccl.communicator(unique_id, int(calls))
        self._at_work = threading.Lock()
        self._transfer_lock, self._holds_lock = nccl.transfer_lock, False
        self._latest = math.inf
        self._closer = threading.Thread(target=self._end, name="nccl-end", daemon=True)

    def accept(self) -> Carrier:
        self.join()
        return self

    def join(self) -> None:
        """Wait until both ends have joined the communicator.

        Raises:
            WorkerUnavailableError: NCCL fails, or the other end does not join in time or has disconnected.
        """
        advice = "for the other end to join: can the hosts reach each other as NCCL_SOCKET_IFNAME says?"
        for _ in self._until(self._is_joined, self._join_seconds, advice):
            pass

    def _is_joined(self) -> bool:
        if not self._stream.is_alive():
            raise WorkerUnavailableError("the other end has gone")
        return bool(self._communicator.is_ready())

    def slots(self, route: Route) -> Sequence[Slot]:
        return self._slots[route.index]

    def start(self, on_end: OnEnd) -> None:
        self._link.open(self)
        self._stream.carry(self.receive)

    def receive(self, frame: Frame) -> None:
        """Handle a frame received over the stream. Only one thread may call this.

        Raises:
            ProtocolError: the protocol does not allow this frame now.
        """
        self._link.receive(frame)

    def close(self) -> None:
        """Abort the communicator; return when it has ended or after a timeout, which leaves its memory in use."""
        with contextlib.suppress(RuntimeError):  # the thread was started by an earlier call
            self._closer.start()
        self._closer.join(2 * GRACE_SECONDS + ABORT_SECONDS)
        if self._closer.is_alive():
            logger.warning("NCCL is still ending a communicator, and transfers of its GPU wait for that")

    def _slot(self, tensor: TensorSpec) -> Slot:
        address, value = self._device.memory(tensor) if self._link.receives else (0, None)
        return _Slot(DEVICE_ONLY, value, self, tensor.size_bytes, address)

    def _lock(self) -> Iterator[bytes]:
        """Take the process's lock for one transfer; yield heartbeats while waiting."""
        take = partial(self._transfer_lock.acquire, blocking=False)
        yield from self._until(take, QUEUE_SECONDS, "for other transfers of its GPU")
        self._holds_lock = True

    def _transferred(self, size_bytes: int) -> Iterator[bytes]:
        """Wait for the transfer that was begun, then release the lock; yield heartbeats while waiting."""
        waits = QUEUE_SECONDS if self._is_first else STALL_SECONDS
        seconds = size_bytes / SLOWEST_BYTES_PER_SECOND + waits
        yield from self._until(self._communicator.is_done, seconds, f"for {size_bytes} bytes to pass")
        self._unlock()

    def _unlock(self) -> None:
        self._holds_lock = False
        self._transfer_lock.release()

    def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> Iterator[bytes]:
        """Wait until ``is_so()``, named ``what`` in errors; yield a heartbeat once per heartbeat interval.

        Raises:
            WorkerUnavailableError: ``seconds`` have passed, NCCL has failed, the other end is silent, or this end was
                closed.
        """
        last_beat = begin = time.monotonic()
        with _as_unavailable():
            while True:
                now = time.monotonic()
                if now > self._latest:
                    raise WorkerUnavailableError("the link was closed")
                if is_so():
                    return
                if now - begin > seconds:
                    raise WorkerUnavailableError(f"this end has waited {seconds:.0f} seconds {what}")
                if now - last_beat > self._link.timeouts.beat_seconds:
                    self._link.require_life(last_beat)
                    last_beat = now
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
            self._slots.clear()
            self._kept = None
            if self._holds_lock:
                self._unlock()
            self._at_work.release()


class _Sending(NcclCarrier):
    _awaits_ready = False

    def receive(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.READY:
            super().receive(frame)
        elif self._awaits_ready:
            self._awaits_ready = False
        else:
            raise ProtocolError("the receiver is ready for a tensor that was not announced")

    def send(self, value: Any, size_bytes: int, header: bytes) -> Iterator[bytes]:
        """Send a value as `Slot.send` does.

        Raises:
            WorkerUnavailableError: the transfer fails or takes too long, or this end was closed.
        """
        with self._at_work, _as_unavailable():
            self._kept = value
            if not self._is_first:
                self._awaits_ready = True
                yield header
                yield from self._until(lambda: not self._awaits_ready, QUEUE_SECONDS, "for the receiver")
            yield from self._lock()
            self._communicator.send(self._device.address(value), size_bytes)
            if self._is_first:
                yield header
            yield from self._transferred(size_bytes)
            self._kept = None


class _Receiving(NcclCarrier):
    """Receives announced tensors one after another in a thread of its own, so that the thread that reads the stream
    does not wait for them. ``on_end(error)`` is called if a transfer fails."""

    def __init__(self, *ends: Any, calls: bool) -> None:
        super().__init__(*ends, calls=calls)
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
        """Receive the announced tensor into the memory at ``address``.

        Raises:
            WorkerUnavailableError: the transfer fails or takes too long, or this end was closed.
        """
        with self._at_work:
            for _ in self._lock():
                pass
            self._communicator.receive(address, size_bytes)
            if self._is_first:
                self._link.send_now(control_frame(FrameKind.READY))
            for _ in self._transferred(size_bytes):
                pass

    def _take(self) -> None:
        try:
            with _as_unavailable():
                while (frame := self._announced.get()) is not None:
                    self._link.receive(frame)
        except Exception as error:
            self._on_end(failure_of(error))


@dataclass(frozen=True, slots=True)
class _Slot(Slot):
    """A slot on the GPU, at ``address`` in the receiver; an empty tensor is not transferred."""

    carrier: Any
    size_bytes: int
    address: int = 0

    def send(self, value: Any, header: bytes) -> Iterator[bytes]:
        return self.carrier.send(value, self.size_bytes, header) if self.size_bytes else iter((header,))

    def wait(self) -> None:
        if self.size_bytes:
            self.carrier.fetch(self.address, self.size_bytes)


def _require_fit(nccl: CudaNccl, peer: NcclEnd) -> None:
    if nccl.version != peer.version:
        raise Unusable(
            f"both ends need the same NCCL, this one has {version_text(nccl.version)}, the other one "
            f"{version_text(peer.version)}"
        )
    if nccl.gpu == peer.gpu:
        raise Unusable("both ends are on the same GPU, and NCCL needs one for each")


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    """Convert errors of NCCL to `WorkerUnavailableError`, the failure of a link."""
    try:
        yield
    except WorkerUnavailableError:
        raise
    except WorkerError as error:
        raise WorkerUnavailableError(str(error)) from error
