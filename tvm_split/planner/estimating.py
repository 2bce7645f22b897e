"""A profile from the graph alone, for planning without machines at hand; every figure in it is an estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rpc_runtime.program import CLIENT
from tvm_split.planner.cost import BYTES_PER_SECOND, OPERATIONS_PER_SECOND
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.profile import ClusterProfile, LinkProfile, MachineProfile, ModelPiece, PieceTime

LINK_BYTES_PER_SECOND = 125e6
LINK_LATENCY_SECONDS = 0.5e-3
"""A lab's gigabit Ethernet."""


def estimated_profile(
    model: str,
    graph: LayerGraph,
    seconds: Mapping[str, float],
    weight_bytes: Mapping[str, int],
    threads: Mapping[str, int],
    links: Sequence[LinkProfile],
) -> ClusterProfile:
    """Every unit of layers is a piece; a machine with twice the threads is taken to be twice as fast.

    ``seconds`` (on one core) and ``weight_bytes`` are the layers', ``threads`` those of every machine. Pairs without a
    link in ``links`` have the one of a gigabit Ethernet.
    """
    pieces = tuple(ModelPiece(unit[0], unit, sum(weight_bytes[layer] for layer in unit), 0) for unit in graph.units)
    alone = {piece.name: sum(seconds[layer] for layer in piece.layers) for piece in pieces}
    known = {(link.source, link.destination) for link in links}
    ends = [CLIENT, *threads]
    return ClusterProfile(
        model=model,
        model_digest="",
        pieces=pieces,
        machines=tuple(_machine(name, count, alone) for name, count in threads.items()),
        links=(
            *links,
            *(
                LinkProfile(source, destination, LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS, "estimated", 0.0)
                for source in ends
                for destination in ends
                if source != destination and (source, destination) not in known
            ),
        ),
    )


def _machine(name: str, threads: int, alone: Mapping[str, float]) -> MachineProfile:
    target: dict[str, Any] = {}
    times = {piece: PieceTime(seconds / threads, seconds / threads, "estimated") for piece, seconds in alone.items()}
    return MachineProfile(
        machine=name,
        target=target,
        threads=threads,
        hostname=name,
        memory_free_bytes=math.inf,
        operations_per_second=OPERATIONS_PER_SECOND * threads,
        bytes_per_second=BYTES_PER_SECOND,
        transfer_seconds=0.0,
        transfer_seconds_per_byte=0.0,
        pieces=times,
        measured_at=0.0,
    )
