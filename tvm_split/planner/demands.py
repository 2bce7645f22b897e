"""Whether a plan that the search did not make is one that it could have made."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_split.planner.problem import Evaluation, Problem, Stage

TOLERANCE = 1e-9


def is_possible(problem: Problem, stages: Sequence[Stage], evaluation: Evaluation) -> bool:
    """Whether the pins allow a plan, and it fits the memory of its machines."""
    limits = {machine.name: machine.memory_bytes for machine in problem.machines}
    return keeps_pins(problem, stages) and all(load.memory_bytes <= limits[load.machine] for load in evaluation.loads)


def keeps_demands(problem: Problem, stages: Sequence[Stage], evaluation: Evaluation) -> bool:
    """Whether a plan keeps to pins, numbers of stages and machines, and limits. Its memory does not count."""
    if problem.stages not in (None, len(stages)):
        return False
    if problem.maximum_machines is not None and len(evaluation.loads) > problem.maximum_machines:
        return False
    return (
        keeps_pins(problem, stages)
        and evaluation.period_seconds <= problem.maximum_period_seconds * (1 + TOLERANCE)
        and evaluation.latency_seconds <= problem.maximum_latency_seconds * (1 + TOLERANCE)
    )


def keeps_pins(problem: Problem, stages: Sequence[Stage]) -> bool:
    """A pinned piece is on its machine alone, without replicas; a forbidden machine has none of them."""
    machines = {piece: stage.machines for stage in stages for piece in stage.layers}
    return all(
        pin.machine not in machines[pin.piece] if pin.forbidden else machines[pin.piece] == (pin.machine,)
        for pin in problem.pins
    )
