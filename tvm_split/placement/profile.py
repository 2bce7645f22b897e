"""The profile of a model on a cluster: the measurements that the planner needs, independent of how they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from tvm_split.cluster.machine import SharedCores
from tvm_split.units import MOST_AMOUNT, SLOWEST

Origin = Literal["measured", "given", "estimated"]
_Ratio = Annotated[float, Field(gt=0, le=MOST_AMOUNT, allow_inf_nan=False)]
_Speed = Annotated[float, Field(ge=SLOWEST, le=MOST_AMOUNT, allow_inf_nan=False)]
SHORTEST_SECONDS = 1e-9
"""Seconds of a piece that computes nothing; with 0, a piece that sends nothing would have infinite throughput."""


@dataclass(frozen=True)
class ModelPiece:
    """Layers that run in common kernels, so that a cut between them would cost more than a transfer.

    ``name`` is that of its first layer. ``weight_bytes`` is the size of prepacked weights; ``activation_bytes`` is the
    largest sum of operands and results of one of its kernels.
    """

    name: str
    layers: tuple[str, ...]
    weight_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class PieceTime:
    """Seconds of one piece for one micro-batch: alone, and under contention with the other machines of the host."""

    seconds: float
    contended_seconds: float
    origin: Origin


@dataclass(frozen=True)
class StreamingCost:
    """Compute seconds that each sent or received tensor costs a machine, per tensor and per byte; 0 if cores are spare.

    ``client_…`` are the seconds that each tensor to or from this machine costs the client.
    """

    transfer_seconds: float = 0.0
    transfer_seconds_per_byte: float = 0.0
    client_transfer_seconds: float = 0.0
    client_transfer_seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class Bus:
    """The bus of a GPU: a copy of b bytes to or from it takes ``latency_seconds + b / bytes_per_second`` seconds."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class MachineProfile:
    """The profile of a machine: the seconds of the model's pieces, its peaks, and the cost of transfers.

    ``operations_per_second`` (a multiplication and an addition are two) and ``bytes_per_second`` are measured peaks.
    ``measured_at`` is in seconds since 1970. ``cores`` is the number of cores that are busy while it computes; 0 for a
    GPU. ``bus`` is the bus that tensors pass, in addition to their link, to and from a GPU.
    """

    machine: str
    target: Mapping[str, Any]
    threads: int
    hostname: str
    memory_free_bytes: float
    operations_per_second: float
    bytes_per_second: float
    streaming: StreamingCost
    pieces: Mapping[str, PieceTime]
    measured_at: float
    cores: int = 1
    bus: Bus | None = None


@dataclass(frozen=True)
class LinkProfile:
    """A one-way link between machines, or a machine and the client.

    A transfer of b bytes takes ``latency_seconds + b / bytes_per_second`` seconds. ``transport`` is the one with which
    the link was measured: ``"grpc"``, ``"shm"``, ``"mpi"``, or ``"nccl"``, which passes no bus of a GPU. For a link
    that was not measured it is empty, or ``"nccl"`` if that transport will be used.
    """

    source: str
    destination: str
    bytes_per_second: float
    latency_seconds: float
    origin: Origin
    measured_at: float
    transport: str = ""


@dataclass(frozen=True)
class Corrections:
    """Corrections of a profile from measurements of runs.

    ``compute_ratios`` are (machine, measured / profiled compute time), ``link_speeds`` are (source, destination, bytes
    per second).
    """

    compute_ratios: tuple[tuple[str, _Ratio], ...] = ()
    link_speeds: tuple[tuple[str, str, _Speed], ...] = ()


@dataclass(frozen=True)
class ClusterProfile:
    """The profile of a model on a cluster. ``model_digest`` identifies the model and its micro-batch size.

    ``doubts`` are messages about measurements that contradict themselves or each other, although they were repeated.
    ``corrections`` are already included in the pieces' times and the links' speeds. Of machines that are in one of
    ``shared_cores``, no two compute at the same time on the same core. ``kept`` are the kept measurements
    and what identifies the machines, by key: a plan made from this profile holds for one that has all of them.
    """

    model: str
    model_digest: str
    pieces: tuple[ModelPiece, ...]
    machines: tuple[MachineProfile, ...]
    links: tuple[LinkProfile, ...]
    doubts: tuple[str, ...] = ()
    corrections: Corrections = Corrections()
    shared_cores: tuple[SharedCores, ...] = ()
    kept: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def measured_at(self) -> float:
        """When the oldest measurement was made, in seconds since 1970; 0 if nothing was measured."""
        return min(self.moments, default=0.0)

    @property
    def moments(self) -> list[float]:
        """The times at which machines and links were measured, in seconds since 1970; estimates are left out."""
        moments = [machine.measured_at for machine in self.machines] + [link.measured_at for link in self.links]
        return [moment for moment in moments if moment]

    @property
    def layer_counts(self) -> dict[str, int]:
        """The number of layers of each piece."""
        return {piece.name: len(piece.layers) for piece in self.pieces}

    @property
    def estimated(self) -> frozenset[tuple[str, str]]:
        """Pairs of a piece and a machine whose time was not measured."""
        return frozenset(
            (name, machine.machine)
            for machine in self.machines
            for name, time in machine.pieces.items()
            if time.origin == "estimated"
        )

    def oversubscription(self, machine: str) -> float:
        """The factor by which oversubscribed cores slow down a machine while all machines of its host compute."""
        cores_of = {machine.machine: machine.cores for machine in self.machines}
        return max(
            [1.0, *(shared.oversubscription(cores_of) for shared in self.shared_cores if machine in shared.machines)]
        )
