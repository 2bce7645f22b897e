"""Parts of plans: written by hand, or what whole stages of a problem are as parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rpc_runtime.program.program import CLIENT
from tvm_split.planner.parts import Delivery, Part, PlanParts
from tvm_split.planner.problem import Problem, Stage


def part(name: str, machine: str, seconds: float, together: float | None = None, **more: float) -> Part:
    return Part(name, "stage", machine, seconds, seconds if together is None else together, **more)  # type: ignore[arg-type]


def parts_of_stages(problem: Problem, stages: Sequence[Stage]) -> PlanParts:
    """Stages of one machine each, in topological order, as one part each."""
    pieces = {piece.name: piece for piece in problem.pieces}
    parts = tuple(
        Part(
            stage.machine,
            stage.machine,
            stage.machine,
            *(math.fsum(pieces[piece].seconds[stage.machine] for piece in stage.layers),) * 2,
            weight_bytes=math.fsum(pieces[piece].weight_bytes for piece in stage.layers),
            activation_bytes=max(pieces[piece].activation_bytes for piece in stage.layers),
        )
        for stage in stages
    )
    part_of = {piece: stage.machine for stage in stages for piece in stage.layers} | {CLIENT: CLIENT}
    found: dict[tuple[object, str, str], Delivery] = {}
    for number, edge in enumerate(problem.edges):
        source, end = part_of[edge.source], part_of[edge.destination]
        tensor = number if edge.tensor is None else edge.tensor
        if source != end:
            takers = () if end == CLIENT else (end,)
            found[tensor, edge.source, end] = Delivery(str(tensor), source, takers, edge.bytes)
    return PlanParts(parts, tuple(found.values()))
