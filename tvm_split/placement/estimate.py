"""Estimate times and profiles from the graph alone, to plan without access to the machines."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.cluster import Cluster, cores_by_address, shared_cores
from tvm_split.cluster.machine import Machine
from tvm_split.placement.graph import ModelDescription
from tvm_split.placement.profile import (
    SHORTEST_SECONDS,
    Bus,
    ClusterProfile,
    LinkProfile,
    MachineProfile,
    ModelPiece,
    PieceTime,
    StreamingCost,
)

LINK_BYTES_PER_SECOND = 125e6
"""Bandwidth of a lab's gigabit Ethernet."""
LINK_LATENCY_SECONDS = 0.5e-3
"""Latency of the same network."""
BUS = Bus(12e9, 20e-6)
"""PCI Express 3.0 with 16 lanes; its latency is the time to begin a copy and to notice its end."""


@dataclass(frozen=True)
class Roofline:
    """The peaks of a processor, and the fixed overhead of each operation."""

    operations_per_second: float
    bytes_per_second: float
    call_seconds: float = 0.0

    def seconds(self, operations: float, moved_bytes: float) -> float:
        """Return the seconds of one operation: the overhead, plus the longer of computing and moving the bytes."""
        return max(operations / self.operations_per_second, moved_bytes / self.bytes_per_second) + self.call_seconds


CORE = Roofline(50e9, 10e9)
"""A present-day CPU core. Only the ratio of the two peaks matters for balance: 5 operations per byte lie between cores
with and without wide vectors."""
GPU = Roofline(10e12, 500e9, 5e-6)
"""A typical present-day GPU in float32, with the time to launch a kernel; for plans made without access to one."""


def estimated_seconds(model: ModelDescription, processor: Roofline = CORE) -> dict[str, float]:
    """Seconds of each layer, by default on one core: the longer of computing and moving the operands once."""
    return {
        layer: math.fsum(processor.seconds(call.operations, call.bytes) for call in calls)
        for layer, calls in model.calls.items()
    }


def estimated_profile(model: ModelDescription, cluster: Cluster) -> ClusterProfile:
    """The estimated profile of a model on a cluster, with one piece for each unit of layers.

    A machine with twice the threads is assumed to be twice as fast. All GPUs, and their buses, are assumed equal.
    """
    weights, units = model.weight_bytes, model.graph.units
    alone = {
        processor: {unit[0]: sum(seconds[layer] for layer in unit) for unit in units}
        for processor in (CORE, GPU)
        for seconds in [estimated_seconds(model, processor)]
    }
    return ClusterProfile(
        model=model.name,
        model_digest="",
        pieces=tuple(ModelPiece(unit[0], unit, sum(weights[layer] for layer in unit), 0) for unit in units),
        machines=tuple(_machine(machine, alone) for machine in cluster.machines),
        links=tuple(_expected_links(cluster)),
        shared_cores=shared_cores(cluster, cores_by_address(cluster)),
    )


def _machine(machine: Machine, alone: Mapping[Roofline, Mapping[str, float]]) -> MachineProfile:
    processor, times = (GPU, 1) if machine.has_gpu else (CORE, machine.threads)
    seconds = {name: max(duration, SHORTEST_SECONDS) / times for name, duration in alone[processor].items()}
    return MachineProfile(
        machine=machine.name,
        target={},
        threads=machine.threads,
        hostname=machine.name,
        memory_free_bytes=math.inf,
        operations_per_second=processor.operations_per_second * times,
        bytes_per_second=processor.bytes_per_second,
        streaming=StreamingCost(),
        pieces={name: PieceTime(duration, duration, "estimated") for name, duration in seconds.items()},
        measured_at=0.0,
        cores=0 if machine.has_gpu else machine.threads,
        bus=BUS if machine.has_gpu else None,
    )


def _expected_links(cluster: Cluster) -> Iterator[LinkProfile]:
    """Yield each open link with the speed that the user gave, else of a usual lab network; infinite in one process."""
    for source, destination in itertools.permutations([CLIENT, *cluster.machine_names], 2):
        link = cluster.link(source, destination)
        transport = cluster.transport_between_gpus(source, destination)
        if cluster.launcher.in_process:
            yield LinkProfile(source, destination, math.inf, 0.0, "given", 0.0)
        elif link is None or link.bytes_per_second is None:
            usual = (LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS)
            yield LinkProfile(source, destination, *usual, "estimated", 0.0, transport)
        elif not link.is_closed:
            speed = (link.bytes_per_second, link.latency_seconds)
            yield LinkProfile(source, destination, *speed, "given", 0.0, transport)
