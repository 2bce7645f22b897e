"""The MPI transport: sends the frames of a link as messages between two ranks that one ``mpiexec`` started.

MPI makes progress only while it is called, and a blocking call keeps a core busy. So no thread blocks in MPI: one
thread per process polls for messages and sleeps briefly if there are none; a sender polls until its frame was sent. MPI
does not report that the other rank died. The gRPC stream that opened the link stays open and reports it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import secrets
import struct
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

from rpc_runtime.errors import InputError, ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.transports.carrier import Carrier, OnEnd, Pending, failure_of
from rpc_runtime.transports.transport import Opening, Transport, Unusable
from rpc_runtime.wire.framing import CHUNK_BYTES, HEADER, decode

JOIN_SECONDS = 60.0
"""Time limit for all ranks of a world to start."""
WORLD_BYTES = 16
LONGEST_BYTES = HEADER.size + CHUNK_BYTES
FRAMES_UNDER_WAY = 4
"""The most frames of one end in flight: while one is sent, the next is made."""
POLL_BUSY_SECONDS, POLL_IDLE_SECONDS, POLL_UNUSED_SECONDS = 50e-6, 1e-3, 50e-3
"""Polling interval: while messages arrive, after `CALM_SECONDS` without one, and while there are no links."""
CALM_SECONDS = 0.05
STOP_SECONDS = 2.0
_RANK = struct.Struct(f"<{WORLD_BYTES}sI")
_ANSWER = struct.Struct(f"<{WORLD_BYTES}sII")


class Mpi(Transport):
    """Connects ranks of one MPI world. An offer holds the world and the caller's rank.

    An answer holds the world, the worker's rank and a number n for the link. Messages to the worker have the tag 2n,
    messages to the caller 2n + 1.
    """

    name = "mpi"
    title = "MPI"
    joins_client = survives = False

    def __init__(self) -> None:
        self.world: World | None = None

    def start(self) -> None:
        self.world = join()

    def stop(self) -> None:
        if self.world is not None:
            self.world.close()

    def offer(self, opening: Opening) -> bytes:
        world = self._own_world()
        return _RANK.pack(world.identity, world.rank)

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        world = self._own_world()
        identity, rank = _unpacked(_RANK, offer)
        world.require(identity, rank)
        number = world.next_number()
        carrier = MpiCarrier(world, rank, number, opening, calls=False)
        return _ANSWER.pack(world.identity, world.rank, number), carrier

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        world = self._own_world()
        identity, rank, number = _unpacked(_ANSWER, answer)
        world.require(identity, rank)
        return MpiCarrier(world, rank, number, opening, calls=True)

    def _own_world(self) -> World:
        if self.world is None:
            raise Unusable(
                "a process at one end is not in an MPI world: start both workers by one mpiexec, with --transport mpi"
            )
        return self.world


def _unpacked(layout: struct.Struct, content: bytes) -> tuple[Any, ...]:
    if len(content) != layout.size:
        raise ProtocolError(f"malformed MPI offer: {layout.size} bytes expected, got {len(content)}")
    return layout.unpack(content)


def join(seconds: float = JOIN_SECONDS) -> World:
    """Initialize MPI and return the world of this process. Call once, in the main thread, before other threads run.

    The process exits if this takes longer than ``seconds``: MPI waits for all ranks and has no timeout of its own.

    Raises:
        InputError: MPI is not installed, or was not started by its own ``mpiexec``.
        WorkerError: the MPI library does not support several threads.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(f"MPI cannot be used ({error}): pip install 'tvm-split[mpi]'") from error
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        level = _initialized_when_all_ranks_are_there(MPI)
        communicator = MPI.COMM_WORLD
        if communicator.size < 2:
            _unlink_own_memory()
            raise InputError(
                "this process is alone in its MPI world: start all workers by one mpiexec, that of the MPI library "
                f"which mpi4py has found ({MPI.Get_library_version().splitlines()[0]})"
            )
        if level < MPI.THREAD_MULTIPLE:
            raise WorkerError("this MPI library does not let several threads use it (MPI_THREAD_MULTIPLE)")
        identity = bytearray(secrets.token_bytes(WORLD_BYTES))
        communicator.Bcast([identity, MPI.BYTE])
        communicator.Barrier()
    finally:
        faulthandler.cancel_dump_traceback_later()
    _unlink_own_memory()
    return World(MPI, bytes(identity))


def _initialized_when_all_ranks_are_there(mpi: Any) -> int:
    """Initialize MPI and return its thread level; the function's name explains the traceback of a timeout."""
    return int(mpi.Init_thread(mpi.THREAD_MULTIPLE))


def _unlink_own_memory() -> None:
    """Unlink MPICH's shared-memory files, which all ranks have mapped: they would stay if a rank is killed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.parent == Path("/dev/shm") and path.name.startswith("mpich_shm_"):  # noqa: S108
            path.unlink(missing_ok=True)


class World:
    """The ranks that one ``mpiexec`` started, seen from this one; polls for the messages of the others."""

    def __init__(self, mpi: Any, identity: bytes) -> None:
        self._mpi = mpi
        self.failure: type[Exception] = mpi.Exception
        self._communicator = mpi.COMM_WORLD
        self.identity, self.rank = identity, int(self._communicator.rank)
        self._numbers = itertools.count()
        self._most_links: int = self._communicator.Get_attr(mpi.TAG_UB) // 2
        self._lock = threading.Lock()
        self._carriers: dict[tuple[int, int], MpiCarrier] = {}
        self._incoming: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._abandoned: list[Any] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="mpi", daemon=True)
        self._thread.start()

    def require(self, identity: bytes, rank: int) -> None:
        """Raise `Unusable` if the other process is not a rank of this world."""
        if identity != self.identity:
            raise Unusable("the two workers are in different MPI worlds: one mpiexec has to start both")
        if rank >= self._communicator.size:
            raise Unusable(f"rank {rank} is not one of the {self._communicator.size} of this MPI world")

    def next_number(self) -> int:
        """Return a number for the next link that another rank opens to this one."""
        return next(self._numbers) % self._most_links

    def add(self, carrier: MpiCarrier) -> None:
        with self._lock:
            self._carriers[carrier.rank, carrier.tag_in] = carrier

    def remove(self, carrier: MpiCarrier) -> None:
        with self._lock:
            self._carriers.pop((carrier.rank, carrier.tag_in), None)

    def send(self, frame: bytes, rank: int, tag: int) -> Any:
        """Begin to send; return the request, which keeps the frame alive and whose ``Test`` says whether it ended."""
        return self._communicator.Isend([frame, self._mpi.BYTE], rank, tag)

    def abandon(self, requests: deque[Any]) -> None:
        """Keep the unfinished requests of a closed link until MPI no longer uses their memory."""
        with self._lock:
            self._abandoned.extend(requests)

    def close(self) -> None:
        """Stop polling. MPI itself is not finalized, because that would wait for all other ranks."""
        self._stopping.set()
        self._thread.join(STOP_SECONDS)

    def _poll(self) -> None:
        last = time.monotonic()
        while not self._stopping.is_set():
            moved = self._begin_to_receive() | self._finish_receiving()
            now = time.monotonic()
            if moved:
                last = now
            elif now - last < CALM_SECONDS:
                time.sleep(POLL_BUSY_SECONDS)
            else:
                with self._lock:
                    self._abandoned = [request for request in self._abandoned if not self._has_ended(request)]
                time.sleep(POLL_IDLE_SECONDS if self._carriers else POLL_UNUSED_SECONDS)

    def _begin_to_receive(self) -> bool:
        status = self._mpi.Status()
        try:
            message = self._communicator.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
            if message is None:
                return False
            size = status.Get_count(self._mpi.BYTE)
            content = bytearray(min(size, LONGEST_BYTES))
            request = message.Irecv([content, self._mpi.BYTE])
        except self.failure as error:
            for carrier in list(self._carriers.values()):
                carrier.end(WorkerUnavailableError(f"MPI has failed: {error}"))
            return False
        self._incoming[status.source, status.tag].append(_Message(request, content, size))
        return True

    def _finish_receiving(self) -> bool:
        """Pass received messages to their links, in order, or drop them if the link is not open; return if any came."""
        moved = False
        for key, queue in list(self._incoming.items()):
            while queue:
                error: TvmSplitError | None = None
                try:
                    if not queue[0].request.Test():
                        break
                except self.failure as wrong:  # the sender died, or the message is longer than its buffer
                    error = WorkerUnavailableError(f"a message did not come whole: {wrong}")
                message, moved = queue.popleft(), True
                if message.size > LONGEST_BYTES:
                    error = ProtocolError(f"a frame has at most {LONGEST_BYTES} bytes, got {message.size}")
                carrier = self._carriers.get(key)
                if carrier is not None and error is not None:
                    carrier.end(error)
                elif carrier is not None:
                    carrier.receive(message.content)
            if not queue:
                del self._incoming[key]
        return moved

    def _has_ended(self, request: Any) -> bool:
        """Return whether a request has ended, successfully or not, so that MPI no longer uses its memory."""
        try:
            return bool(request.Test())
        except self.failure:
            return True


class _Message(NamedTuple):
    """A message of ``size`` bytes that is being received into ``content``."""

    request: Any
    content: bytearray
    size: int


class MpiCarrier(Carrier):
    """Carries one end of a link to and from ``rank``; ``number`` is the link's number, given by the called end.

    It receives from its creation on. After ``start`` it sends the link's frames in a thread of its own.
    """

    def __init__(self, world: World, rank: int, number: int, opening: Opening, *, calls: bool) -> None:
        self.rank = rank
        self.tag_in = 2 * number + calls
        self._tag_out = 2 * number + (not calls)
        self._world = world
        self._link = opening.link
        self._on_end: OnEnd | None = None
        self._failure: TvmSplitError | None = None
        self._ending = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name=f"link-{opening.peer}-mpi", daemon=True)
        world.add(self)

    def start(self, on_end: OnEnd) -> None:
        self._link.open(self)
        with self._ending:
            self._on_end, failure = on_end, self._failure
        if failure is not None:  # of a message that arrived before
            on_end(failure)
        else:
            self._thread.start()

    def receive(self, message: bytearray) -> None:
        """Handle a message of the other end."""
        try:
            self._link.receive(decode(memoryview(message)))
        except Exception as error:
            self.end(failure_of(error))

    def end(self, error: TvmSplitError) -> None:
        with self._ending:
            was_over, on_end = self._over.is_set(), self._on_end
            self._over.set()
            self._failure = self._failure or error
        self._world.remove(self)
        if not was_over and on_end is not None:
            on_end(error)

    def close(self) -> None:
        self._over.set()
        self._world.remove(self)
        if self._thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # the thread was never started
                self._thread.join(self._link.timeouts.beat_seconds + STOP_SECONDS)

    def _send(self) -> None:
        under_way: deque[Any] = deque()
        try:
            for frame in self._link.frames():
                under_way.append(self._world.send(frame, self.rank, self._tag_out))
                while under_way and under_way[0].Test():
                    under_way.popleft()
                if len(under_way) == FRAMES_UNDER_WAY:
                    self._wait(under_way[0])
                if self._over.is_set():
                    return
        except self._world.failure as error:
            self.end(WorkerUnavailableError(f"MPI could not send: {error}"))
        except Exception as error:
            self.end(failure_of(error))
        finally:
            self._world.abandon(under_way)

    def _wait(self, request: Any) -> None:
        while not request.Test():
            since = time.monotonic()
            if self._over.wait(POLL_BUSY_SECONDS):
                return
            self._link.require_life(since)
