"""A profile from the graph alone, for planning without machines at hand; every figure in it is an estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm_split.planner.cost import BYTES_PER_SECOND, OPERATIONS_PER_SECOND
from tvm_split.planner.layer_graph import LayerGraph
from tvm_split.planner.profile import (
    SHORTEST_SECONDS,
    ClusterProfile,
    LinkProfile,
    MachineProfile,
    ModelPiece,
    PieceTime,
    StreamingCost,
)

LINK_BYTES_PER_SECOND = 125e6
LINK_LATENCY_SECONDS = 0.5e-3
"""A lab's gigabit Ethernet."""


def estimated_profile(
    model: str,
    graph: LayerGraph,
    seconds: Mapping[str, float],
    weight_bytes: Mapping[str, int],
    threads: Mapping[str, int],
    links: tuple[LinkProfile, ...],
) -> ClusterProfile:
    """Every unit of layers is a piece; a machine with twice the threads is taken to be twice as fast.

    ``seconds`` (on one core) and ``weight_bytes`` are the layers', ``threads`` those of every machine.
    """
    pieces = tuple(ModelPiece(unit[0], unit, sum(weight_bytes[layer] for layer in unit), 0) for unit in graph.units)
    alone = {piece.name: max(sum(seconds[layer] for layer in piece.layers), SHORTEST_SECONDS) for piece in pieces}
    return ClusterProfile(
        model=model,
        model_digest="",
        pieces=pieces,
        machines=tuple(_machine(name, count, alone) for name, count in threads.items()),
        links=links,
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
        streaming=StreamingCost(),
        pieces=times,
        measured_at=0.0,
    )
