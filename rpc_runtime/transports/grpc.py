"""Carries a link over the gRPC call by which it was opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from rpc_runtime.errors import ProtocolError
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.transport import Carrier, OnEnd, Opening, Pending, Transport
from rpc_runtime.wire.framing import Frame


class Stream(Carrier):
    """One end of the call. It carries the link from `start` on, and otherwise stays silent beside another carrier.

    Its end is told by the call, so ``on_end`` is not needed. ``is_alive`` says whether the call goes on.
    """

    def __init__(self, link: LinkEnd, is_alive: Callable[[], bool]) -> None:
        self.is_alive = is_alive
        self._link = link
        self._settled = threading.Event()
        self._over = threading.Event()
        self._take: Callable[[Frame], None] | None = None

    def start(self, on_end: OnEnd) -> None:
        self._link.open(self)
        self.carry(self._link.receive)

    def carry(self, take: Callable[[Frame], None]) -> None:
        """From now on says what the link says, and gives what comes to ``take``."""
        self._take = take
        self._settled.set()

    @property
    def carries(self) -> bool:
        """Whether the link, or a part of it, is carried here."""
        return self._take is not None

    def leave(self) -> None:
        """The carrier has started: if it is another one, nothing is said here until `close`."""
        self._settled.set()

    def frames(self) -> Iterator[bytes]:
        """What this end says, until `close`. For one thread.

        Raises:
            WorkerUnavailableError: the other end has been silent for too long.
        """
        self._settled.wait()
        if self._take is not None:
            yield from self._link.frames()
        else:
            self._over.wait()

    def receive(self, frame: Frame) -> None:
        """Takes what comes.

        Raises:
            ProtocolError: it is not what may come next.
        """
        if self._take is None:
            raise ProtocolError(f"a frame of kind {frame.kind.name} came beside what carries the link")
        self._take(frame)

    def wait_closed(self, seconds: float) -> bool:
        return self._over.wait(seconds)

    def close(self) -> None:
        self._over.set()
        self._settled.set()


class Grpc(Transport):
    """Joins any two ends."""

    name = "grpc"
    title = "gRPC"
    rank = 0

    def offer(self, opening: Opening) -> bytes:
        return b""

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        return b"", StreamPending(opening.stream)

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        return opening.stream


class StreamPending:
    """The stream is there already."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def accept(self) -> Carrier:
        return self._stream

    def close(self) -> None: ...
