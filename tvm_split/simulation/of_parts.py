"""Scenarios of plans that are predicted by parts: a stage for each part, as such a plan is compiled.

They are those whose machines compute stages together, or have several by hand.
"""

from __future__ import annotations

import math

from rpc_runtime.program.link_setting import Transport
from rpc_runtime.program.program import CLIENT
from tvm_split.errors import PlanError
from tvm_split.planner.parts import Delivery
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import LinkPrediction, Prediction
from tvm_split.planner.timetable import ends_of
from tvm_split.simulation.scenario import LinkTimes, MachineTimes, ProgramBuilder, Scenario, StageTimes


def scenario_of_parts(plan: Plan, prediction: Prediction) -> Scenario:
    """The plan's parts and what passes between them, each tensor by itself; nothing of the cores that they share.

    A link's seconds are shared out over its tensors by their bytes.

    Raises:
        PlanError: the prediction has no parts, or parts, tensors and links that do not fit together.
    """
    if not prediction.parts:
        shared = next((stage.name for stage in plan.stages if stage.sharding), "a stage")
        raise PlanError(
            f"the machines of {shared} compute it together, and the plan's prediction does not say what each of "
            "them computes between exchanges: it was made before plans kept that; make the plan anew with `tvm-split "
            "plan`"
        )
    layers = {stage.name: stage.layers for stage in plan.stages}
    machines: dict[str, dict[str, StageTimes]] = {each.machine: {} for each in prediction.machines}
    builder = ProgramBuilder()
    for part in prediction.parts:
        if part.machine not in machines or part.stage not in layers:
            raise unfit(f"{part.name} is of {part.stage} on {part.machine!r}, and there is no such stage or machine")
        if any(part.name in stages for stages in machines.values()):
            raise unfit(f"there are two parts {part.name}")
        builder.stage(part.name, (part.machine,), (0,), layers[part.stage])
        machines[part.machine][part.name] = StageTimes(part.alone_seconds, part.compute_seconds, part.transfer_seconds)
    _add_tensors(builder, prediction)
    cores = {each.machine: each.cores for each in prediction.machines}
    times = {name: MachineTimes(stages, cores[name]) for name, stages in machines.items()}
    return Scenario(builder.program(), times, _links(prediction))


def _add_tensors(builder: ProgramBuilder, prediction: Prediction) -> None:
    """Every tensor once, in the order in which they are made: that is the order in which they leave."""
    place = {part.name: number for number, part in enumerate(prediction.parts)}
    takers: dict[str, list[str | None]] = {}
    made: dict[str, Delivery] = {}
    for each in prediction.deliveries:
        source = -1 if each.source == CLIENT else place.get(each.source, len(place))
        if CLIENT in each.takers:
            raise unfit(f"{each.tensor} goes to a part named {CLIENT!r}; what the client takes has no takers")
        for taker in each.takers or (CLIENT,):
            if source >= (len(place) if taker == CLIENT else place.get(taker, -1)):
                raise unfit(f"{each.tensor} goes from {each.source} to {taker}, which does not follow it")
        if made.setdefault(each.tensor, each).source != each.source:
            raise unfit(f"{each.tensor} is made by {made[each.tensor].source} and by {each.source}")
        takers.setdefault(each.tensor, []).extend(each.takers or (None,))
    taking = {taker for each in prediction.deliveries for taker in each.takers}
    idle = next((name for name in place if name not in taking), None)
    if idle is not None:
        raise unfit(f"{idle} takes nothing")
    for name, each in made.items():
        builder.tensor(name, each.bytes, None if each.source == CLIENT else each.source, takers[name])


def _links(prediction: Prediction) -> dict[tuple[str, str], LinkTimes]:
    machine_of = {part.name: part.machine for part in prediction.parts}
    crossing: dict[tuple[str, str], list[Delivery]] = {}
    for each in prediction.deliveries:
        source, end = ends_of(each, machine_of)
        if source != end:
            crossing.setdefault((source, end), []).append(each)
    predicted = {(each.source, each.destination): each for each in prediction.links}
    lacking = next((ends for ends in crossing if ends not in predicted), None)
    if lacking is not None:
        raise unfit(f"nothing is predicted of the link from {lacking[0]} to {lacking[1]}")
    return {ends: _link(predicted[ends], own) for ends, own in crossing.items()}


def _link(link: LinkPrediction, crossing: list[Delivery]) -> LinkTimes:
    whole = math.fsum(each.bytes for each in crossing)
    wires = {each.tensor: link.stream_seconds * (each.bytes / whole if whole else 0.0) for each in crossing}
    latency = max(0.0, link.seconds - link.stream_seconds)
    return LinkTimes(latency, wires, shares_memory=link.transport == Transport.SHARED_MEMORY)


def unfit(what: str) -> PlanError:
    """The prediction, which is in a file that people edit, does not fit together."""
    return PlanError(f"the plan's prediction does not fit together: {what}; make the plan anew with `tvm-split plan`")
