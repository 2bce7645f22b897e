"""Machines, links and shared cores, and the validation of these values."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, InstanceOf

from rpc_runtime.errors import InputError
from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import AUTO, TRANSPORTS, memory_of, transport_named
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.worker.config import require_options
from tvm_split.errors import ClusterError
from tvm_split.parameters import Count, Number, fit_fields
from tvm_split.units import MOST_AMOUNT, SLOWEST, ShownFields, short_list
from tvm_split.values import Location


class Fault(NamedTuple):
    """What is wrong, and its path in a file, such as ``("links", 2, "from")``.

    ``first`` is the path of the other entry, if two entries contradict each other.
    """

    location: Location
    text: str
    first: Location | None = None


def repeated_names(what: str, names: Iterable[str]) -> Iterator[Fault]:
    """Yield the faults of names that two entries of the list ``{what}s`` have."""
    indices: dict[str, int] = {}
    for index, name in enumerate(names):
        first = indices.setdefault(name, index)
        if first != index:
            text = f"two {what}s are named {name!r}; give each a name of its own"
            yield Fault((f"{what}s", index, "name"), text, (f"{what}s", first, "name"))


def unknown_name(
    what: str, name: str, known: Collection[str], location: Location, groups: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield the fault of a name that is not ``known``; the message also suggests ``groups``."""
    if name not in known:
        listed = f", and the groups {short_list(groups)}" if groups else ""
        names = short_list([other for other in known if other != CLIENT])
        yield Fault(location, f"no {what} is named {name!r}; there are {names}{listed}")


def link_faults(
    links: Iterable[tuple[str, str]], known: Collection[str], groups: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield the faults of links, by source and destination: unknown ends, loops and duplicates."""
    indices: dict[tuple[str, str], int] = {}
    for index, ends in enumerate(links):  # there may be a million
        if not (ends[0] in known and ends[1] in known):
            for key, end in zip(("from", "to"), ends, strict=True):
                yield from unknown_name("machine", end, known, ("links", index, key), groups)
        elif ends[0] == ends[1]:
            text = f"the link from {ends[0]!r} joins a machine to itself; tensors inside a machine need no link"
            yield Fault(("links", index, "to"), text)
        first = indices.setdefault(ends, index)
        if first != index:
            text = f"a second link from {ends[0]!r} to {ends[1]!r}; leave one, or turn one round for the way back"
            yield Fault(("links", index), text, ("links", first))


MOST_CORES = 8192
"""The most CPUs that a Linux kernel can be configured for: a larger number is a mistake, for example bytes."""
Cores = Annotated[int, Field(ge=1, le=MOST_CORES, strict=True)]


@dataclass(frozen=True, repr=False)
class SharedCores(ShownFields):
    """A number of ``cores`` on which all these machines compute; ``"client"`` may be among them.

    The machines' busy times add up on these cores: while one machine computes, another may have to wait.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    machines: Annotated[tuple[str, ...], Field(min_length=1)]
    cores: Cores

    def __post_init__(self) -> None:
        fit_fields(self, ClusterError)

    def oversubscription(self, cores_of: Mapping[str, int]) -> float:
        """Return the sum of the machines' own core counts, divided by the cores that they share.

        Below 1 some cores stay free; above 1 the cores are oversubscribed, and machines wait for each other.
        """
        return sum(cores_of.get(name, 0) for name in self.machines) / self.cores


STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How values are read from files."""


@dataclass(frozen=True)
class SshAccess:
    """How ssh reaches a machine, and how its worker is started there.

    ``destination`` is that of the ``ssh`` command, ``python`` the command that starts Python on the machine. The worker
    is installed below ``folder``. ``arguments`` are further options of the worker, and ``files`` those whose files
    `tvm-split up` copies from here; a worker that runs already reads them again.

    Raises:
        ClusterError: the destination is not valid for ssh, or the worker does not have such an option.
    """

    __pydantic_config__ = STRICT

    destination: Annotated[str, Field(alias="to")]
    python: str = "python3"
    folder: str = "~/.cache/tvm-split/ssh"
    arguments: tuple[str, ...] = ()
    files: Mapping[Literal["tls_ca", "tls_certificate", "tls_key", "tokens"], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.destination or self.destination.startswith("-"):
            raise ClusterError(f"ssh takes a destination like box or user@box, got {self.destination!r}")
        try:
            require_options(self.arguments)
        except InputError as error:
            raise ClusterError(f"{shlex.join(self.arguments)!r} cannot be a worker's options: {error}") from error


@dataclass(frozen=True, repr=False)
class Machine(ShownFields):
    """A machine that runs stages.

    ``target`` is a TVM target as a dictionary (``{"kind": "llvm", "mcpu": "znver4"}``), or None for the target that the
    machine's worker reports. ``memory_bytes`` limits the memory for weights; None is no limit. ``endpoint`` is where
    its worker listens; None while no worker runs. ``described_at`` is where a file describes the machine
    (``PATH:LINE``), for errors; empty for a machine made by code. ``ssh`` says how to start its worker. A machine on
    ``standby`` has no place in a plan: it takes stages when another machine fails.
    """

    name: str
    threads: Cores = 1
    target: Mapping[str, Any] | None = None
    memory_bytes: Annotated[Count, Field(le=int(MOST_AMOUNT))] | None = None
    endpoint: InstanceOf[WorkerEndpoint] | None = None
    described_at: str = field(default="", compare=False, repr=False)
    ssh: SshAccess | None = None
    standby: bool = False

    @property
    def address(self) -> str | None:
        """The address at which its worker listens; None while no worker runs."""
        return None if self.endpoint is None else self.endpoint.address

    @property
    def has_gpu(self) -> bool:
        """Whether the machine's stages are compiled for a GPU."""
        return self.target is not None and self.target.get("kind") == "cuda"

    def __post_init__(self) -> None:
        fit_fields(self, ClusterError)
        if self.name in ("", CLIENT):
            raise ClusterError(f"a machine cannot be named {self.name!r}")
        if not isinstance(self.target, Mapping | None):
            text = f"machine {self.name!r} has the target {self.target!r}; give a dictionary such as {{'kind': 'llvm'}}"
            raise ClusterError(text)


AUTO_CODEC = "auto"
"""The ``codec`` of a link whose plan chooses one."""


@dataclass(frozen=True, repr=False)
class Link(ShownFields):
    """A one-way link: the transfer of ``b`` bytes takes ``latency_seconds + b / bytes_per_second``.

    ``source`` or ``destination`` may be ``"client"``, the process that deploys. ``bytes_per_second`` is None for a link
    that is measured, and 0 for a link that is closed to all transfers. ``address`` (HOST:PORT) is where ``source``
    reaches the worker of ``destination``, if that is not the client's address for it.

    ``transport`` is ``"auto"`` (shared memory on one host, unless an address is given), ``"grpc"``, ``"shm"``,
    ``"mpi"`` between workers that one ``mpiexec`` started with ``--transport mpi``, ``"nccl"`` from GPU to GPU, or one
    that an installed package adds. A transport that cannot carry the link is refused. ``codec`` is how tensors are
    encoded on a network link: ``"none"``, one of `rpc_runtime.program.codecs.CODECS` for every tensor that it fits, or
    ``"auto"``: the planner chooses.
    """

    __pydantic_config__ = STRICT

    source: Annotated[str, Field(alias="from")]
    destination: Annotated[str, Field(alias="to")]
    bytes_per_second: Annotated[float | None, Number] = None
    latency_seconds: Annotated[float, Number, Field(ge=0, le=MOST_AMOUNT)] = 0.0
    address: str | None = None
    transport: str = "auto"
    codec: str = NONE

    def __post_init__(self) -> None:
        fit_fields(self, ClusterError)
        label = f"the link from {self.source!r} to {self.destination!r}"
        is_client = CLIENT in (self.source, self.destination)
        if self.bytes_per_second and not SLOWEST <= self.bytes_per_second <= MOST_AMOUNT:
            raise ClusterError(
                f"{label} has bytes_per_second={self.bytes_per_second}; give more than 0 ({SLOWEST:g} to "
                f"{MOST_AMOUNT:g}), 0 for no traffic, or None to have it measured"
            )
        if self.latency_seconds and not self.bytes_per_second:
            raise ClusterError(f"{label} has a latency and no bytes_per_second; give both, or neither to measure them")
        if self.address is not None:
            if is_client:
                raise ClusterError(f"{label} has an address; the client calls the address of the machine itself")
            try:
                Address.callable(self.address)
            except InputError as error:
                raise ClusterError(f"{label}: {error}") from error
        if self.transport not in (AUTO, *TRANSPORTS):
            raise ClusterError(f"{label} has transport {self.transport!r}; there are {', '.join((AUTO, *TRANSPORTS))}")
        if is_client and self.transport != AUTO and not transport_named(self.transport).joins_client:
            raise ClusterError(f"{label} has the transport {self.transport}, which joins no client: leave it auto")
        if self.codec not in (AUTO_CODEC, NONE) and self.codec not in CODECS:
            codecs = ", ".join((AUTO_CODEC, *CODECS))
            raise ClusterError(f"{label} has codec {self.codec!r}; there are {codecs}")
        if memory_of(self.transport) == "device" and self.codec not in (AUTO_CODEC, NONE):
            raise ClusterError(
                f"{label} has the transport {self.transport}, by which no codec writes: leave out codec {self.codec}"
            )

    @property
    def is_closed(self) -> bool:
        """Whether no transfer may use this link."""
        return self.bytes_per_second == 0


def faults(
    machines: Sequence[Machine],
    links: Sequence[Link] | None,
    shared_cores: Sequence[SharedCores] = (),
    *,
    groups: Sequence[str] = (),
) -> Iterator[Fault]:
    """Yield the faults of machines, links and shared cores together.

    If ``links`` are given, every two machines need one, in either direction. Messages about an unknown name also
    suggest ``groups``.
    """
    names = dict.fromkeys(machine.name for machine in machines)
    known, pairs = {**names, CLIENT: None}, [(link.source, link.destination) for link in links or ()]
    yield from repeated_names("machine", (machine.name for machine in machines))
    if machines and all(machine.standby for machine in machines):
        yield Fault(("machines",), "every machine is on standby; leave one at least to plan on")
    machine_at: dict[str, int] = {}
    for index, machine in enumerate(machines):
        first = index if machine.address is None else machine_at.setdefault(machine.address, index)
        if first != index:
            text = f"machines {machines[first].name!r} and {machine.name!r} have the same address {machine.address}"
            where = ("machines", index, "address")
            yield Fault(where, f"{text}; each needs a worker of its own", ("machines", first, "address"))
    for index, shared in enumerate(shared_cores):
        for name in shared.machines:
            yield from unknown_name("machine", name, known, ("shared_cores", index, "machines"), groups)
    without_gpu = {machine.name for machine in machines if not machine.has_gpu}
    for index, (link, ends) in enumerate(zip(links or (), pairs, strict=True)):
        lacking = [end for end in ends if end in without_gpu]
        if lacking and memory_of(link.transport) == "device":
            text = f"{' and '.join(map(repr, lacking))} {'have' if len(lacking) > 1 else 'has'} no target with a GPU"
            yield Fault(
                ("links", index, "transport"),
                f"the link from {ends[0]!r} to {ends[1]!r} has the transport {link.transport}, and {text}: "
                "leave it auto",
            )
    yield from link_faults(pairs, known, groups)
    joined = {frozenset(pair) for pair in pairs}
    missing = [pair for pair in combinations(names, 2) if links is not None and frozenset(pair) not in joined]
    if missing:
        shown = short_list([f"{first!r} and {second!r}" for first, second in missing])
        yield Fault(
            ("links",),
            f"no link between {shown}; give the pair a link: with bytes_per_second, without it to have the speed "
            "measured, or with bytes_per_second: 0 if nothing may pass between the two",
        )
