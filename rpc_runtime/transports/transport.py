"""What carries links: the transports by name, what each of them does, and which one a link gets.

A link is opened by a gRPC call, the stream, which stays open beside every transport: its end is the link's end.

    caller ── Hello: offers, the best first ──▶ worker       `Transport.offer`
    caller ◀── Accept: the first that is possible ── worker  `Transport.answer`, reasons for those before it
    caller ── Choice ──▶ worker                              `Transport.connect` or gRPC, then `Pending.accept`

A new transport is one class, in `TRANSPORTS` or an entry point of the group ``tvm_split.transports``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from rpc_runtime.errors import TvmSplitError, WorkerError
from rpc_runtime.program.routes import Route
from rpc_runtime.registry import Registry
from rpc_runtime.transports.slots import Slot

if TYPE_CHECKING:
    from rpc_runtime.transports.grpc import Stream
    from rpc_runtime.transports.link_end import LinkEnd

AUTO = "auto"
"""The best transport that joins the two ends, of those that have a rank."""
FALLBACK = "grpc"
"""Joins any two ends, over the stream itself."""

OnEnd = Callable[[TvmSplitError | None], None]


class Unusable(WorkerError):
    """A transport cannot join these two ends; the message says why."""


@dataclass(frozen=True)
class Host:
    """What plans know of the process at one end of a link. ``memory_domain`` is equal for processes that can share
    memory, and empty where none can be shared."""

    memory_domain: str = ""


@dataclass(frozen=True)
class Opening:
    """A link that is being opened, at one of its ends. ``peer`` is the other machine."""

    link: LinkEnd
    deployment: str
    peer: str
    stream: Stream


class Carrier(ABC):
    """Brings what one end of a link says to the other end, and hands what comes from there to the link.

    It takes what is to be said from `LinkEnd.frames` in a thread of its own, or from `LinkEnd.drain` in `wake`.
    """

    def slots(self, route: Route) -> Sequence[Slot]:
        """``route.depth`` slots in memory that both ends see; () where tensors travel in frames."""
        return ()

    @abstractmethod
    def start(self, on_end: OnEnd) -> None:
        """Opens the link, once, by `LinkEnd.open`, and hands on what comes.

        ``on_end`` is called at most once, when the link ends otherwise than by `close`; None: the other end closed it.

        Raises:
            TvmSplitError: the two ends cannot be joined after all; the link has then failed.
        """

    def wake(self) -> None:  # noqa: B027  (most have a thread that waits)
        """There may be something to say. Called by any thread, without the link's lock; must not raise."""

    @abstractmethod
    def close(self) -> None:
        """Ends the link and joins its threads, for 5 s at most. May be called again, and before `start`."""


class Pending(Protocol):
    """What a called end has made ready for a caller that has not chosen yet."""

    def accept(self) -> Carrier:
        """The carrier, once the caller has chosen this.

        Raises:
            TvmSplitError: the caller does not come for it.
        """
        ...

    def close(self) -> None:
        """Frees what `accept` did not take. May be called again."""
        ...


class Transport(ABC):
    """One way to carry links; there is one instance in a process."""

    name: ClassVar[str]
    """In cluster files, in the protocol and in reports."""
    title: ClassVar[str]
    """In sentences."""
    rank: ClassVar[int | None] = None
    """The highest that joins two ends is taken by `AUTO`; None: only if it is asked for."""
    memory: ClassVar[Literal["none", "host", "device"]] = "none"
    """Where the tensors lie that both ends see; ``device``: both ends have a GPU."""
    uses_codecs: ClassVar[bool] = True
    joins_client: ClassVar[bool] = True
    connect_seconds: ClassVar[float] = 0.0
    """What `connect` may take, beyond the time in which a caller chooses."""

    def start(self) -> None:  # noqa: B027  (most need nothing)
        """Makes a worker ready to use it, for ``--transport NAME``. Called by the main thread, before all others start.

        Raises:
            InputError: this process cannot use it.
        """

    def stop(self) -> None:  # noqa: B027
        """Frees what `start` has made."""

    def joins(self, source: Host, destination: Host) -> bool:
        """Whether it will join two processes, as far as plans can tell."""
        return True

    @abstractmethod
    def offer(self, opening: Opening) -> bytes:
        """What the caller says of itself.

        Raises:
            WorkerError: this end cannot use it, `Unusable` as a rule; the message is the reason.
        """

    @abstractmethod
    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        """What the called end says to an offer, and what it makes ready.

        Raises:
            WorkerError: it cannot join the two, `Unusable` as a rule; the message is the reason.
            ProtocolError: that is no offer.
        """

    @abstractmethod
    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        """The caller's carrier, which is then chosen and started.

        Raises:
            WorkerError: it cannot join the two, `Unusable` as a rule; the link falls back to gRPC if that was offered.
            ProtocolError: that is no answer.
        """


TRANSPORTS: Registry[type[Transport]] = Registry(
    "tvm_split.transports",
    "transport",
    {
        "grpc": "rpc_runtime.transports.grpc:Grpc",
        "shm": "rpc_runtime.transports.shared_memory:SharedMemory",
        "mpi": "rpc_runtime.transports.mpi:Mpi",
        "nccl": "rpc_runtime.transports.nccl:Nccl",
    },
    Transport,
    WorkerError,
)


@cache
def transport_named(name: str) -> Transport:
    """This process's instance of a transport.

    Raises:
        WorkerError: there is none of this name; the message lists those that there are.
        PluginError: the package that adds it is broken.
    """
    return TRANSPORTS[name]()


@cache
def ranked() -> tuple[str, ...]:
    """The names of the transports that `AUTO` offers, the best first."""
    ranks = {name: kind.rank for name, kind in TRANSPORTS.items() if kind.rank is not None}
    return tuple(sorted(ranks, key=lambda name: -ranks[name]))


def offered(transport: str) -> tuple[str, ...]:
    """The names of the transports that a caller offers where a link is to have this one, the best first."""
    return ranked() if transport == AUTO else (transport,)


def memory_of(transport: str) -> str:
    """Where tensors lie that both ends of such a link see: ``none``, ``host`` or ``device``; ``none`` for `AUTO`."""
    return "none" if transport in ("", AUTO) else transport_named(transport).memory


def uses_codecs(transport: str) -> bool:
    """Whether codecs write the tensors of such a link; of an unknown one (empty) they may."""
    return transport in ("", AUTO) or transport_named(transport).uses_codecs


@dataclass(frozen=True)
class LinkSetting:
    """How a link is to be opened.

    Args:
        address: where the source reaches the destination, if not where the client does. A link with an address is to
            pass there, so by itself it shares no memory.
        transport: a name, or `AUTO`.
    """

    address: str | None = None
    transport: str = AUTO

    @property
    def wanted(self) -> str:
        return FALLBACK if self.transport == AUTO and self.address else self.transport

    def expected(self, source: Host, destination: Host) -> str:
        """The name of the transport that will carry it, as far as plans can tell."""
        return next(
            (name for name in offered(self.wanted) if transport_named(name).joins(source, destination)), FALLBACK
        )


LinkSettings = Mapping[tuple[str, str], LinkSetting]
"""By (source, destination), either of which may be the client; `DEFAULT` where there is none."""
DEFAULT = LinkSetting()
NO_SETTINGS: LinkSettings = MappingProxyType({})
