"""Stages by numbers and their flow, which a search evaluates."""

from __future__ import annotations

import graphlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import Flow, NumberedStep
from tvm_split.planner.problem import Stage
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.timetable import NumberedTransfer
from tvm_split.units import names_of


@dataclass(frozen=True)
class Placement:
    """A stage by numbers: the pieces in topological order, and the machines that share its micro-batches."""

    machines: tuple[int, ...]
    pieces: tuple[int, ...]


def placed(instance: Instance, stages: Sequence[Stage]) -> list[Placement]:
    """Return stages by numbers; their names must be valid (see `tvm_split.planner.step_graph.lower`)."""
    return [
        Placement(
            tuple(instance.machine_number[machine] for machine in stage.machines),
            tuple(sorted(instance.piece_number[piece] for piece in stage.layers)),
        )
        for stage in stages
    ]


def flow_of_stages(
    instance: Instance, stages: Sequence[Placement], share_of: Mapping[int, float] | None = None
) -> tuple[tuple[Placement, ...], Flow]:
    """Return the stages in topological order, and their evaluated flow.

    Replicas get shares in proportion to their speeds, or the shares in ``share_of``, by machine.

    Raises:
        PlanError: stages wait for each other in a cycle, or a link is missing.
    """
    stage_of = {piece: number for number, stage in enumerate(stages) for piece in stage.pieces}
    stage_of[instance.client] = instance.client
    transfers = [
        (source, end, tensor.bytes)
        for tensor in instance.tensors
        for source in (stage_of[tensor.source],)
        for end in dict.fromkeys(stage_of[piece] for piece in tensor.destinations)
        if end != source
    ]
    if any(source > end >= 0 for source, end, _ in transfers):
        order = _topological_order(instance, stages, transfers)
        stages = [stages[number] for number in order]
        place = {number: place for place, number in enumerate(order)} | {instance.client: instance.client}
        transfers = [(place[source], place[end], size) for source, end, size in transfers]
    numbered = [
        NumberedTransfer(source, () if end == instance.client else (end,), size) for source, end, size in transfers
    ]
    steps = [_step(instance, stage, share_of) for stage in stages]
    return tuple(stages), Flow(instance.problem, instance, steps, numbered)


def _step(instance: Instance, stage: Placement, share_of: Mapping[int, float] | None) -> NumberedStep:
    pieces = list(stage.pieces)
    seconds = [math.fsum(instance.times[pieces, machine]) for machine in stage.machines]
    several = len(stage.machines) > 1
    shares: tuple[float, ...] = () if several else (1.0,)
    if share_of and several:
        shares = tuple(share_of[machine] for machine in stage.machines)
    return NumberedStep(
        stage.machines,
        shares,
        seconds,
        max(seconds),
        math.fsum(instance.weights[pieces]),
        float(instance.activations[pieces].max()),
    )


def _topological_order(
    instance: Instance, stages: Sequence[Placement], transfers: Sequence[tuple[int, int, float]]
) -> tuple[int, ...]:
    before: dict[int, set[int]] = {number: set() for number in range(len(stages))}
    for source, end, _ in transfers:
        if instance.client not in (source, end):
            before[end].add(source)
    try:
        return tuple(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError as error:
        names = [names_of([instance.machines[m] for m in stages[number].machines]) for number in error.args[1]]
        raise PlanError(f"the stages wait for each other in a circle: {' → '.join(reversed(names))}") from error
