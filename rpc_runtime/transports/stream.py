"""One end of the gRPC call that opens a link, and carries it unless another transport does."""

import threading
from collections.abc import Callable, Iterator

from rpc_runtime.errors import ProtocolError
from rpc_runtime.transports.carrier import Carrier, OnEnd
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.wire.framing import Frame


class Stream(Carrier):
    """One end of the gRPC call that opens a link. It carries the link after `start`, unless another carrier does.

    The call itself reports its end, so ``on_end`` is not used. ``is_alive`` returns whether the call is active.
    """

    joins_frames = True

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
        """Start sending the link's frames, and pass received frames to ``take``."""
        self._take = take
        self._settled.set()

    @property
    def carries(self) -> bool:
        """Whether this stream carries the link or a part of it."""
        return self._take is not None

    def leave(self) -> None:
        """Let `frames` begin, because the carrier has started; without `carry`, it yields nothing until `close`."""
        self._settled.set()

    def frames(self) -> Iterator[bytes]:
        """Yield the frames to send until `close`. Only one thread may call this.

        Raises:
            WorkerUnavailableError: nothing was received from the other end for too long.
        """
        self._settled.wait()
        if self._take is not None:
            yield from self._link.frames()
        else:
            self._over.wait()

    def receive(self, frame: Frame) -> None:
        """Handle a received frame.

        Raises:
            ProtocolError: the protocol does not allow this frame now.
        """
        if self._take is None:
            raise ProtocolError(
                f"unexpected frame {frame.kind.name} on the gRPC stream: another transport carries the link"
            )
        self._take(frame)

    def wait_closed(self, seconds: float) -> bool:
        return self._over.wait(seconds)

    def close(self) -> None:
        self._over.set()
        self._settled.set()
