"""A profile from the graph alone, for planning without machines at hand; every figure in it is an estimate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.hosts import cores_by_address, shared_cores
from tvm_split.cluster.machine import Machine
from tvm_split.model import Model
from tvm_split.planner.cost import BYTES_PER_SECOND, OPERATIONS_PER_SECOND, estimated_seconds, weight_bytes
from tvm_split.planner.profile import (
    SHORTEST_SECONDS,
    ClusterProfile,
    LinkProfile,
    MachineProfile,
    ModelPiece,
    PieceTime,
    StreamingCost,
)
from tvm_split.rpc_runtime.program.program import CLIENT

LINK_BYTES_PER_SECOND = 125e6
LINK_LATENCY_SECONDS = 0.5e-3
"""A lab's gigabit Ethernet."""


def estimated_profile(model: Model, cluster: Cluster) -> ClusterProfile:
    """Every unit of layers is a piece; a machine with twice the threads is taken to be twice as fast."""
    seconds, weights = estimated_seconds(model), weight_bytes(model)
    units = model.graph.units
    alone = {unit[0]: max(sum(seconds[layer] for layer in unit), SHORTEST_SECONDS) for unit in units}
    return ClusterProfile(
        model=model.name,
        model_digest="",
        pieces=tuple(ModelPiece(unit[0], unit, sum(weights[layer] for layer in unit), 0) for unit in units),
        machines=tuple(_machine(machine, alone) for machine in cluster.machines),
        links=tuple(_expected_links(cluster)),
        shared_cores=shared_cores(cluster, cores_by_address(cluster)),
    )


def _machine(machine: Machine, alone: Mapping[str, float]) -> MachineProfile:
    threads = machine.threads
    return MachineProfile(
        machine=machine.name,
        target={},
        threads=threads,
        hostname=machine.name,
        memory_free_bytes=math.inf,
        operations_per_second=OPERATIONS_PER_SECOND * threads,
        bytes_per_second=BYTES_PER_SECOND,
        streaming=StreamingCost(),
        pieces={name: PieceTime(each / threads, each / threads, "estimated") for name, each in alone.items()},
        measured_at=0.0,
        cores=threads,
    )


def _expected_links(cluster: Cluster) -> Iterator[LinkProfile]:
    """What the user says of each link, else what a lab's network usually is; in one process nothing is sent at all."""
    for source, destination in itertools.permutations([CLIENT, *cluster.machine_names], 2):
        given = cluster.link(source, destination)
        if cluster.kind == "in_process":
            yield LinkProfile(source, destination, math.inf, 0.0, "given", 0.0)
        elif given is None or given.bytes_per_second is None:
            yield LinkProfile(source, destination, LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS, "estimated", 0.0)
        elif not given.is_closed:
            yield LinkProfile(source, destination, given.bytes_per_second, given.latency_seconds, "given", 0.0)
