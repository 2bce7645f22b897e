"""Times and profiles from the graph alone, for planning without machines at hand; every figure is an estimate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.hosts import cores_by_address, shared_cores
from tvm_split.cluster.machine import Machine
from tvm_split.planner.graph import ModelDescription
from tvm_split.planner.profile import (
    SHORTEST_SECONDS,
    Bus,
    ClusterProfile,
    LinkProfile,
    MachineProfile,
    ModelPiece,
    PieceTime,
    StreamingCost,
)

OPERATIONS_PER_SECOND = 50e9
BYTES_PER_SECOND = 10e9
"""Of one present-day CPU core. Only the ratio of the two matters for balance: it says how many operations a byte is
worth, and 5 lies between cores with and without wide vectors."""
LINK_BYTES_PER_SECOND = 125e6
LINK_LATENCY_SECONDS = 0.5e-3
"""A lab's gigabit Ethernet."""
BUS = Bus(12e9, 20e-6)
"""PCI Express 3.0 with 16 lanes, and what it takes to begin a copy and to notice its end."""


@dataclass(frozen=True)
class Roofline:
    """What a processor does in a second at most, and what each operation takes besides."""

    operations_per_second: float
    bytes_per_second: float
    call_seconds: float = 0.0


CORE = Roofline(OPERATIONS_PER_SECOND, BYTES_PER_SECOND)
GPU = Roofline(10e12, 500e9, 5e-6)
"""Some GPU of these years, in float32, and the launch of a kernel: so that plans without one at hand are of any use."""


def estimated_seconds(model: ModelDescription, processor: Roofline = CORE) -> dict[str, float]:
    """Seconds per layer, by default on one core: the longer of computing and of moving the operands once."""
    return {
        layer: math.fsum(
            max(call.operations / processor.operations_per_second, call.bytes / processor.bytes_per_second)
            + processor.call_seconds
            for call in calls
        )
        for layer, calls in model.calls.items()
    }


def estimated_profile(model: ModelDescription, cluster: Cluster) -> ClusterProfile:
    """Every unit of layers is a piece; a machine with twice the threads is taken to be twice as fast, and GPUs to be
    all the same, on buses that are all the same."""
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
    seconds = {name: max(each, SHORTEST_SECONDS) / times for name, each in alone[processor].items()}
    return MachineProfile(
        machine=machine.name,
        target={},
        threads=machine.threads,
        hostname=machine.name,
        memory_free_bytes=math.inf,
        operations_per_second=processor.operations_per_second * times,
        bytes_per_second=processor.bytes_per_second,
        streaming=StreamingCost(),
        pieces={name: PieceTime(each, each, "estimated") for name, each in seconds.items()},
        measured_at=0.0,
        cores=0 if machine.has_gpu else machine.threads,
        bus=BUS if machine.has_gpu else None,
    )


def _expected_links(cluster: Cluster) -> Iterator[LinkProfile]:
    """What the user says of each link, else what a lab's network usually is; in one process nothing is sent at all."""
    for source, destination in itertools.permutations([CLIENT, *cluster.machine_names], 2):
        given = cluster.link(source, destination)
        transport = cluster.transport_between_gpus(source, destination)
        if cluster.launcher.in_process:
            yield LinkProfile(source, destination, math.inf, 0.0, "given", 0.0)
        elif given is None or given.bytes_per_second is None:
            usual = (LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS)
            yield LinkProfile(source, destination, *usual, "estimated", 0.0, transport)
        elif not given.is_closed:
            speed = (given.bytes_per_second, given.latency_seconds)
            yield LinkProfile(source, destination, *speed, "given", 0.0, transport)
