"""The interface of transports, which carry links; their registry; and the choice of one for each link.

A link is opened by a gRPC call, the stream. It stays open with every transport, and when it ends, the link ends.

    caller ── Hello: offers, the best first ──▶ worker       `Transport.offer`
    caller ◀── Accept: the first that is possible ── worker  `Transport.answer`, reasons for those before it
    caller ── Choice ──▶ worker                              `Transport.connect` or gRPC, then `Pending.accept`

To add a transport, write a `Transport` and a `Carrier`; register the first in `TRANSPORTS`, or a package names it in
an entry point ``tvm_split.transports``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from rpc_runtime.errors import WorkerError
from rpc_runtime.registry import PluginError, Registry
from rpc_runtime.transports.carrier import Carrier, Pending

if TYPE_CHECKING:
    from rpc_runtime.transports.link_end import LinkEnd
    from rpc_runtime.transports.stream import Stream

AUTO = "auto"
"""Selects the transport of the highest rank that can connect the two ends."""
FALLBACK = "grpc"
"""The transport that connects any two ends, over the stream itself."""


class Unusable(WorkerError):
    """A transport cannot connect the two ends of a link; the message is the reason."""


@dataclass(frozen=True)
class Opening:
    """One end of a link that is being opened; ``peer`` is the machine at the other end."""

    link: LinkEnd
    deployment: str
    peer: str
    stream: Stream


class Transport(ABC):
    """One way to carry links; each process has one instance."""

    name: ClassVar[str]
    """Identifier in cluster files, in the protocol and in reports."""
    title: ClassVar[str]
    """Name in messages."""
    rank: ClassVar[int | None] = None
    """`AUTO` takes the transport of the highest rank that connects two ends; None: used only if requested by name."""
    memory: ClassVar[Literal["none", "host", "device"]] = "none"
    """Where the memory is that both ends share; ``device``: both ends have a GPU."""
    uses_codecs: ClassVar[bool] = True
    joins_client: ClassVar[bool] = True
    outlives_machines: ClassVar[bool] = True
    """Whether the links between other machines stay when one has ended."""
    connect_seconds: float = 0.0
    """Time that `connect` may take, added to the time limit for the caller's choice."""

    def start(self) -> None:  # noqa: B027  (most need nothing)
        """Prepare a worker for ``--transport NAME``. Called by the main thread before other threads start.

        Raises:
            InputError: this process cannot use the transport.
        """

    def stop(self) -> None:  # noqa: B027
        """Free what `start` has made."""

    def joins(self, source: str, destination: str) -> bool:
        """Return whether this transport will connect two processes, as far as known before deployment.

        ``source`` and ``destination`` are their memory domains: equal if they can share memory, empty if not known.
        """
        return True

    @abstractmethod
    def offer(self, opening: Opening) -> bytes:
        """Return the caller's offer: what the called end must know about the caller.

        Raises:
            WorkerError: this end cannot use the transport, usually `Unusable`; the message is the reason.
        """

    @abstractmethod
    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        """Return the called end's answer to an offer, and the carrier that it has prepared.

        Raises:
            WorkerError: the transport cannot connect the ends, usually `Unusable`; the message is the reason.
            ProtocolError: the offer is malformed.
        """

    @abstractmethod
    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        """Return the caller's carrier, which is then chosen and started.

        Raises:
            WorkerError: it cannot connect the ends, usually `Unusable`; the link then uses gRPC if that was offered.
            ProtocolError: the answer is malformed.
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
    """Return this process's instance of a transport.

    Raises:
        WorkerError: no transport has this name; the message lists the known ones.
        PluginError: the package that provides it is broken.
    """
    kind = TRANSPORTS[name]
    with TRANSPORTS.blamed(name):
        return kind()


@cache
def ranked() -> tuple[str, ...]:
    """Return the names of the transports that `AUTO` offers, the best first; warn of plug-ins that are broken."""
    ranks: dict[str, int] = {}
    for name, kind in TRANSPORTS.items():
        with contextlib.suppress(PluginError), TRANSPORTS.blamed(name):
            if not isinstance(kind.rank, int | None):
                raise TypeError(f"its rank is {kind.rank!r}, not a whole number or None")
            if kind.rank is not None and transport_named(name):
                ranks[name] = kind.rank
    return tuple(sorted(ranks, key=lambda name: -ranks[name]))


def offered(transport: str) -> tuple[str, ...]:
    """Return the names of the transports that a caller offers for this setting of a link, the best first."""
    return ranked() if transport == AUTO else (transport,)


def memory_of(transport: str) -> str:
    """Return where the shared memory of a transport is: ``none``, ``host`` or ``device``; ``none`` for `AUTO`."""
    return "none" if transport in ("", AUTO) else transport_named(transport).memory


def uses_codecs(transport: str) -> bool:
    """Return whether a transport encodes tensors with codecs; True if it is not known yet (empty or `AUTO`)."""
    return transport in ("", AUTO) or transport_named(transport).uses_codecs


@dataclass(frozen=True)
class LinkSetting:
    """How a link is to be opened.

    Args:
        address: where the source reaches the destination, if it differs from the client's address for it. A link
            with an address must use that network, so `AUTO` then means gRPC.
        transport: a name, or `AUTO`.
    """

    address: str | None = None
    transport: str = AUTO

    @property
    def wanted(self) -> str:
        return FALLBACK if self.transport == AUTO and self.address else self.transport

    def expected(self, source: str, destination: str) -> str:
        """Return the name of the transport that will connect two memory domains, as far as this is known."""
        for name in offered(self.wanted):
            with contextlib.suppress(PluginError), TRANSPORTS.blamed(name):
                if transport_named(name).joins(source, destination):
                    return name
        return FALLBACK


LinkSettings = Mapping[tuple[str, str], LinkSetting]
"""Settings by (source, destination), either of which may be the client; `DEFAULT` for links not listed."""
DEFAULT = LinkSetting()
NO_SETTINGS: LinkSettings = MappingProxyType({})
