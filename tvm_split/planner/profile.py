"""What was measured of a model on the machines of a cluster: what the planner has to know, and not how it is got."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.units import MOST_AMOUNT, SLOWEST

Origin = Literal["measured", "given", "estimated"]
_Ratio = Annotated[float, Field(gt=0, le=MOST_AMOUNT, allow_inf_nan=False)]
_Speed = Annotated[float, Field(ge=SLOWEST, le=MOST_AMOUNT, allow_inf_nan=False)]
SHORTEST_SECONDS = 1e-9
"""Of a piece that computes nothing: without it, one that sends nothing either would have an endless throughput."""


@dataclass(frozen=True)
class ModelPiece:
    """Layers that run in common kernels, so that a cut between them would cost more than a transfer.

    ``name`` is that of its first layer. ``weight_bytes`` as they are prepacked; ``activation_bytes`` is the largest
    sum of operands and results of one of its kernels.
    """

    name: str
    layers: tuple[str, ...]
    weight_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class PieceTime:
    """Seconds of one piece for one micro-batch: by itself, and while the other machines of the host compute as well."""

    seconds: float
    contended_seconds: float
    origin: Origin


@dataclass(frozen=True)
class StreamingCost:
    """What a stream takes from computing, in seconds for every tensor that is sent or received, and as a ratio.

    A stage that computes for ``c`` seconds by itself takes ``ratio * c`` while a stream is served, and
    ``transfer_seconds`` for each tensor on top. The values with ``alone_`` are for a plan of this machine only, the
    others for plans in which the other machines of its host, and the client if it is there, are busy too: what each
    end of a tensor takes of the host's cores, the client's included. Nothing, where cores are left over.
    ``start_seconds`` is what a stage that computes takes longer there, since others had its core and caches before.
    """

    transfer_seconds: float = 0.0
    transfer_seconds_per_byte: float = 0.0
    ratio: float = 1.0
    alone_transfer_seconds: float = 0.0
    alone_ratio: float = 1.0
    start_seconds: float = 0.0


@dataclass(frozen=True)
class Bus:
    """Between a host's memory and its GPU's: ``latency_seconds + b / bytes_per_second`` for b bytes, either way."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class MachineProfile:
    """A machine: the model's pieces on it, its ceilings, and what transfers cost its cores.

    ``operations_per_second`` (a multiplication and an addition are two) and ``bytes_per_second`` are what the machine
    reaches at most, measured. ``measured_at`` is in seconds since 1970. ``cores`` are those that it keeps busy while it
    computes; a GPU none. ``bus`` is what tensors pass besides their link, on the way to a GPU and from it.
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
    """A one-way link between machines, or a machine and the client: ``latency_seconds + b / bytes_per_second``.

    ``transport`` is what carried it while it was measured: ``"grpc"``, ``"shm"``, ``"mpi"``, or ``"nccl"``, which
    passes no bus of a GPU. Of a link that is given it is empty, but for ``"nccl"``, which then is expected.
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
    """What runs have said of a profile since it was measured.

    ``compute_ratios`` as (machine, how many times as long as profiled it computes), ``link_speeds`` as (source,
    destination, bytes a second).
    """

    compute_ratios: tuple[tuple[str, _Ratio], ...] = ()
    link_speeds: tuple[tuple[str, str, _Speed], ...] = ()


@dataclass(frozen=True)
class ClusterProfile:
    """A model on a cluster. ``model_digest`` says which model and micro-batch size this is for.

    ``doubts`` says in words which measurements contradict themselves or each other, although they were repeated.
    ``corrections`` are in the pieces' times and the links' speeds already. Of machines that are in one of
    ``shared_cores``, no two compute at the same time on the same core.
    """

    model: str
    model_digest: str
    pieces: tuple[ModelPiece, ...]
    machines: tuple[MachineProfile, ...]
    links: tuple[LinkProfile, ...]
    doubts: tuple[str, ...] = ()
    corrections: Corrections = Corrections()
    shared_cores: tuple[SharedCores, ...] = ()

    @property
    def measured_at(self) -> float:
        """When the oldest measurement was made, in seconds since 1970; 0 if nothing was measured."""
        ages = [each.measured_at for each in self.machines] + [each.measured_at for each in self.links]
        return min(filter(None, ages), default=0.0)

    @property
    def layer_counts(self) -> dict[str, int]:
        """Of each piece the number of its layers."""
        return {piece.name: len(piece.layers) for piece in self.pieces}

    @property
    def estimated(self) -> frozenset[tuple[str, str]]:
        """The pieces, and the machines, of which the times were not measured."""
        return frozenset(
            (name, machine.machine)
            for machine in self.machines
            for name, time in machine.pieces.items()
            if time.origin == "estimated"
        )

    def even_seconds(self, machine: MachineProfile) -> float:
        """What a stage computes on a machine, if all take an even part."""
        return math.fsum(each.seconds for each in machine.pieces.values()) / len(self.machines)

    @property
    def even_bytes(self) -> float:
        """What a stage reads and writes then: its weights, and what one of its kernels takes and makes."""
        weights = sum(each.weight_bytes for each in self.pieces) / len(self.machines)
        return weights + max((each.activation_bytes for each in self.pieces), default=0)

    def oversubscription(self, machine: str) -> float:
        """How many times longer computing takes when all machines of a host do only because its cores are too few."""
        cores_of = {each.machine: each.cores for each in self.machines}
        return max([1.0, *(each.oversubscription(cores_of) for each in self.shared_cores if machine in each.machines)])
