"""A planning problem: machines, links, the pieces of a model and the transfers between them. Names and numbers only.

A problem does not depend on TVM or a network, so it can be replayed, varied and checked by other programs. In a problem
file the fields have the same names. Seconds and bytes are those of one micro-batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, ConfigDict, Field

from rpc_runtime.program.round_robin import schedule_by_share
from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.machine import MOST_CORES, Fault, SharedCores, link_faults, repeated_names, unknown_name
from tvm_split.errors import PlanError
from tvm_split.units import LEAST_AMOUNT, MOST_AMOUNT, SLOWEST

Objective = Literal["throughput", "latency"]
Precision = Literal["float32", "float16", "bfloat16"]
"""The dtype of the operands of convolutions and products; they accumulate in float32."""
TOLERANCE = 1e-9
"""Relative difference below which two values count as equal; rounding of sums in another order is smaller."""
DEFAULT_TIME_LIMIT_SECONDS = 10.0
"""Of the search for a plan."""
Amount = Annotated[float, Field(ge=0, le=MOST_AMOUNT, allow_inf_nan=False)]
"""Seconds or bytes."""
Share = Annotated[float, Field(gt=0, le=MOST_AMOUNT, allow_inf_nan=False)]
"""Share of the micro-batches, or of each one. The shares of a stage add up to 1, or count in proportion."""
Factor = Annotated[float, Field(ge=LEAST_AMOUNT, le=MOST_AMOUNT, allow_inf_nan=False)]
BytesPerSecond = Annotated[float, Field(ge=SLOWEST, le=MOST_AMOUNT)]
Count = Annotated[int, Field(ge=1)]


def _divisible(seconds: float) -> float:
    if 0 < seconds < LEAST_AMOUNT:
        raise ValueError(f"it must be 0, or at least {LEAST_AMOUNT:g}")
    return seconds


Seconds = Annotated[Amount, AfterValidator(_divisible)]
From = Annotated[str, Field(alias="from")]
"""A source, named ``from`` in files; Python reserves this word."""
To = Annotated[str, Field(alias="to")]
"""A destination, named ``to`` in files."""


class Timed(Protocol):
    """Any object with a period and a latency: an evaluation, a prediction, a plan to compare with."""

    @property
    def period_seconds(self) -> float: ...

    @property
    def latency_seconds(self) -> float: ...


def objective_seconds(objective: str, plan: Timed) -> float:
    """The seconds that an objective minimises: the period for throughput, else the latency."""
    return plan.period_seconds if objective == "throughput" else plan.latency_seconds


def gap_of(value: float, lower_bound: float) -> float:
    """The optimality gap, (value - lower bound) / value: the share of ``value`` that a better plan may save at most."""
    return max(0.0, (value - lower_bound) / value) if value > 0 else 0.0


@dataclass(frozen=True)
class ProblemMachine:
    """A machine that can hold one stage.

    ``transfer_seconds`` and ``transfer_seconds_per_byte`` are the computing time that sending or receiving one tensor
    costs: on a machine whose cores all compute, serialising delays computing. ``contention`` is the factor by which
    computing slows down while other machines of the same host compute; plans of one machine have none. All three affect
    the period only: the latency is that of a single micro-batch. ``cores`` is the number of cores that it computes on,
    where they are shared (`SharedCores`); 0 for a GPU.
    """

    name: str
    memory_bytes: Amount = math.inf
    transfer_seconds: Amount = 0.0
    transfer_seconds_per_byte: Amount = 0.0
    contention: Factor = 1.0
    cores: Annotated[int, Field(ge=0, le=MOST_CORES)] = 1


@dataclass(frozen=True)
class ProblemLink:
    """A one-way link between two machines, or a machine and the client (``"client"``)."""

    source: From
    destination: To
    bytes_per_second: BytesPerSecond
    latency_seconds: Amount = 0.0


@dataclass(frozen=True)
class Piece:
    """The smallest unit that is placed. ``seconds`` by machine; a machine that is missing there cannot run it.

    The ``activation_bytes`` of a stage are those of its largest piece, the ``weight_bytes`` the sum over its pieces.
    """

    name: str
    seconds: Mapping[str, Seconds]
    weight_bytes: Amount = 0.0
    activation_bytes: Amount = 0.0


@dataclass(frozen=True)
class Edge:
    """A transfer of ``bytes`` from one piece, or the client, to another piece, or the client.

    Edges of one source that name the same ``tensor`` carry the same bytes, which are sent once to each machine.
    """

    source: From
    destination: To
    bytes: Amount
    tensor: str | None = None


@dataclass(frozen=True)
class Pin:
    """A piece that must be ``on`` a machine, or must be ``not_on`` it.

    Raises:
        ValueError: the pin has both, or neither.
    """

    piece: str
    on: str | None = None
    not_on: str | None = None

    def __post_init__(self) -> None:
        if (self.on is None) == (self.not_on is None):
            raise ValueError('a pin has either "on" or "not_on"')

    @property
    def machine(self) -> str:
        return self.on or self.not_on or ""

    @property
    def forbidden(self) -> bool:
        return self.not_on is not None


@dataclass(frozen=True)
class Problem:
    """The problem of placing pieces on machines.

    Attributes:
        objective: the least period (``"throughput"``) or the least latency.
        pieces: for a chain in its order, else in any order in which ``edges`` point forward.
        replicas: whether a stage may have replicas on several machines.
        maximum_machines: the most machines that a plan may use.
        stages: the exact number of stages.
        maximum_period_seconds, maximum_latency_seconds: upper limits, whatever the objective.
        buffers: micro-batches of each tensor that a machine buffers for every transfer, at either end.
        shared_cores: machines, and the client, that compute on the same cores. The client uses them to send and
            receive: ``client_transfer_seconds`` and ``client_transfer_seconds_per_byte`` for each tensor.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    objective: Objective
    machines: tuple[ProblemMachine, ...]
    links: tuple[ProblemLink, ...]
    pieces: tuple[Piece, ...]
    edges: tuple[Edge, ...]
    replicas: bool = False
    pins: tuple[Pin, ...] = ()
    maximum_machines: Count | None = None
    stages: Count | None = None
    maximum_period_seconds: Amount = math.inf
    maximum_latency_seconds: Amount = math.inf
    buffers: Annotated[int, Field(ge=0, le=int(MOST_AMOUNT))] = 0
    shared_cores: tuple[SharedCores, ...] = ()
    client_transfer_seconds: Amount = 0.0
    client_transfer_seconds_per_byte: Amount = 0.0

    @cached_property
    def link_of(self) -> Mapping[tuple[str, str], ProblemLink]:
        """The links by source and destination."""
        return {(link.source, link.destination): link for link in self.links}

    @cached_property
    def memory_limits(self) -> Mapping[str, float]:
        """Bytes of memory by machine, without machines that have no limit."""
        return {machine.name: machine.memory_bytes for machine in self.machines if math.isfinite(machine.memory_bytes)}


Axis = Literal["rows", "columns", "channels", "heads", "batch"]
Exchange = Literal["fused", "each"]
SHARES_TOLERANCE = 1e-3
"""Largest difference between 1 and the sum of the shares of a sharding: people write 0.333."""


@dataclass(frozen=True)
class Sharding:
    """How a stage is sharded over its machines: along which ``axis``, and when they exchange parts.

    ``exchange`` is "fused" if they send as little as possible, "each" if they send after every layer; see
    `tvm_split.placement.by_hand.Shard`.
    """

    axis: Axis
    exchange: Exchange = "fused"


@dataclass(frozen=True)
class Stage:
    """Layers, in the order of execution, on one machine, on several replicas, or sharded over several machines.

    ``shares`` has, for each machine, its share of the micro-batches, or with a ``sharding`` its share of each one. In a
    solution, which knows only pieces, ``layers`` are the names of pieces, in any order, and ``name`` is empty.
    """

    machines: tuple[str, ...]
    layers: tuple[str, ...]
    shares: tuple[Share, ...] = (1.0,)
    name: str = ""
    sharding: Sharding | None = None

    @property
    def machine(self) -> str:
        """The first or only machine."""
        return self.machines[0]

    @cached_property
    def replica_schedule(self) -> tuple[int, ...]:
        """The round-robin schedule: ``machines[schedule[s % len(schedule)]]`` computes micro-batch ``s``.

        Raises:
            ValueError: there is no round-robin schedule with these shares.
        """
        return (0,) if self.sharding else schedule_by_share(self.shares)


@dataclass(frozen=True)
class MachineLoad:
    """The load of a machine for one micro-batch, on average where a stage has replicas.

    ``compute_seconds`` includes contention and the cost of transfers; ``share`` is the largest share of a stage's
    micro-batches that the machine computes.
    """

    machine: str
    compute_seconds: float
    receive_seconds: float
    send_seconds: float
    weight_bytes: float
    activation_bytes: float
    buffer_bytes: float
    bytes_received: float
    bytes_sent: float
    share: float

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes


@dataclass(frozen=True)
class CoresLoad:
    """The load, per micro-batch, of ``cores`` that several machines of a plan, or one and the client, share.

    ``busy_seconds`` are core-seconds, so the period is at least ``least_period_seconds``. If all machines computed at
    the same time, they would use ``wanted_cores``.
    """

    machines: tuple[str, ...]
    cores: Annotated[int, Field(ge=1)]
    busy_seconds: Amount
    wanted_cores: int

    @property
    def oversubscription(self) -> float:
        """The factor by which computing slows down if all machines compute at the same time; at least 1."""
        return max(1.0, self.wanted_cores / self.cores)

    @property
    def least_period_seconds(self) -> float:
        return self.busy_seconds / self.cores


@dataclass(frozen=True)
class Evaluation:
    """The performance of a set of stages. ``limiting`` says what sets the period: a machine, link or cores.

    ``shared_cores`` are those of the problem that the plan uses.
    """

    period_seconds: float
    latency_seconds: float
    loads: tuple[MachineLoad, ...]
    limiting: str
    shared_cores: tuple[CoresLoad, ...] = ()


def require_valid(problem: Problem) -> None:
    """Raise a `PlanError` for the first fault of a problem, if there is one."""
    for fault in faults(problem):
        raise PlanError(fault.text)


def faults(problem: Problem) -> Iterator[Fault]:
    """The faults of a problem: names that are unknown or repeated, and impossible counts. Types check the ranges.

    A repeated message is yielded once. If machine or piece names are wrong, references to names are not checked.
    """
    wrong_names = [*_name_faults("machine", problem.machines), *_name_faults("piece", problem.pieces)]
    reported: set[str] = set()
    for fault in wrong_names or _reference_faults(problem):
        if fault.text not in reported:
            reported.add(fault.text)
            yield fault


def _name_faults(what: str, entries: Sequence[ProblemMachine | Piece]) -> Iterator[Fault]:
    if not entries:
        yield Fault((f"{what}s",), f"there are no {what}s; name at least one")
    for index, entry in enumerate(entries):
        if entry.name in ("", CLIENT):
            wrong = f"cannot be named {CLIENT!r}, which stands for the caller" if entry.name else "has no name"
            yield Fault((f"{what}s", index, "name"), f"a {what} {wrong}")
    yield from repeated_names(what, (entry.name for entry in entries))


def _reference_faults(problem: Problem) -> Iterator[Fault]:
    machines, pieces = ({entry.name: None for entry in entries} for entries in (problem.machines, problem.pieces))
    ends = {**machines, CLIENT: None}
    yield from link_faults(((link.source, link.destination) for link in problem.links), ends)
    for index, piece in enumerate(problem.pieces):
        if not piece.seconds.keys() <= machines.keys():
            for name in piece.seconds:
                yield from unknown_name("machine", name, machines, ("pieces", index, "seconds", name))
    yield from _edge_faults(problem, {**pieces, CLIENT: None})
    for index, pin in enumerate(problem.pins):
        yield from unknown_name("piece", pin.piece, pieces, ("pins", index, "piece"))
        where = ("pins", index, "not_on" if pin.forbidden else "on")
        yield from unknown_name("machine", pin.machine, machines, where)
    for index, shared in enumerate(problem.shared_cores):
        for place, name in enumerate(shared.machines):
            where_shared = ("shared_cores", index, "machines", place)
            yield from unknown_name("machine", name, ends, where_shared)
            if name in shared.machines[:place]:
                yield Fault(where_shared, f"shared cores name {name!r} twice; give it once")
    limits = [
        (len(machines), f"there are {len(machines)} machines, and each holds one stage"),
        (len(pieces), f"there are {len(pieces)} pieces, and a stage holds at least one"),
    ]
    if (most := problem.maximum_machines) is not None:
        limits.append((most, f"at most {most} machines may be used, and each holds one stage"))
    limit, text = min(limits)
    if problem.stages is not None and problem.stages > limit:
        yield Fault(("stages",), f"{problem.stages} stages were asked for, but {text}; ask for fewer")


def _edge_faults(problem: Problem, known: Mapping[str, None]) -> Iterator[Fault]:
    bytes_of: dict[tuple[str, str], float] = {}
    for index, edge in enumerate(problem.edges):
        yield from unknown_name("piece", edge.source, known, ("edges", index, "from"))
        yield from unknown_name("piece", edge.destination, known, ("edges", index, "to"))
        what = f"edge from {edge.source!r} to {edge.destination!r}"
        if edge.source == edge.destination:
            yield Fault(("edges", index, "to"), f"{what} goes to itself")
        if edge.tensor is not None and bytes_of.setdefault((edge.source, edge.tensor), edge.bytes) != edge.bytes:
            before = bytes_of[edge.source, edge.tensor]
            text = f"{what}: tensor {edge.tensor!r} has {edge.bytes!r} bytes here and {before!r} on an edge before"
            yield Fault(("edges", index, "bytes"), text)
