"""Scenarios of plans: from a prediction, or from a planning problem and stages for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpc_runtime.program.link_setting import Transport
from rpc_runtime.program.program import CLIENT, Program
from rpc_runtime.program.turns import EVERY, Recurrence, turns_of
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import LinkPrediction, Prediction
from tvm_split.planner.problem import Problem, Stage
from tvm_split.planner.rare_replicas import with_turns
from tvm_split.planner.search import evaluate
from tvm_split.planner.search.instance import Instance, instance_of
from tvm_split.simulation.of_parts import scenario_of_parts, unfit
from tvm_split.simulation.scenario import LinkTimes, MachineTimes, ProgramBuilder, Scenario, StageTimes
from tvm_split.units import short_list


def scenario_of_plan(plan: Plan) -> Scenario:
    """What a plan predicts of its machines and links, as a scenario: all that goes from a stage to another is a tensor.

    Of stages that machines compute together, the parts are stages, and each has the tensors that it would exchange.

    Raises:
        PlanError: nothing is predicted, or not what machines do that compute stages together.
    """
    prediction = plan.prediction
    if prediction is None:
        raise PlanError(
            "the plan has no prediction, so nothing is known of its times; make one with `tvm-split plan`, of a split "
            "by hand with --predict"
        )
    _require_fit(plan, prediction)
    scenario = (
        _of_stages(plan, prediction) if _has_whole_stages(plan, prediction) else scenario_of_parts(plan, prediction)
    )
    shared = tuple(SharedCores(each.machines, each.cores) for each in prediction.shared_cores)
    return replace(scenario, shared_cores=shared, client_seconds=_client_seconds(prediction))


def _require_fit(plan: Plan, prediction: Prediction) -> None:
    """A `PlanError` where machines of the plan and of its prediction, which is in a file that people edit, part."""
    machines = {name for stage in plan.stages for name in stage.machines}
    predicted = {each.machine for each in prediction.machines}
    linked = {end for link in prediction.links for end in (link.source, link.destination)} - {CLIENT}
    unknown, lacking = sorted((predicted | linked) - machines), sorted(machines - predicted)
    if unknown:
        raise unfit(f"it names {unknown[0]!r}, and the plan's machines are {short_list(sorted(machines))}")
    if lacking:
        raise unfit(f"it says nothing of {lacking[0]!r}")


def _has_whole_stages(plan: Plan, prediction: Prediction) -> bool:
    """Each on machines of its own."""
    return not prediction.parts and not any(stage.sharding for stage in plan.stages)


def _of_stages(plan: Plan, prediction: Prediction) -> Scenario:
    """Of a plan whose machines compute whole stages."""
    builder = ProgramBuilder()
    home: dict[str, tuple[str, Recurrence]] = {}
    for stage in plan.stages:
        builder.stage(stage.name, stage.machines, stage.turns, stage.layers)
        for replica, machine in enumerate(stage.machines):
            home[machine] = stage.name, turns_of(replica, stage.turns)
    place = {stage.name: number for number, stage in enumerate(plan.stages)}
    pairs: dict[tuple[str | None, str | None], dict[tuple[str, str], LinkPrediction]] = {}
    for link in prediction.links:
        ends = (_stage_of(home, link.source), _stage_of(home, link.destination))
        if place.get(ends[0] or "", -1) >= place.get(ends[1] or "", len(place)):
            raise unfit(f"{link.source} sends to {link.destination}, whose stage does not follow")
        pairs.setdefault(ends, {})[link.source, link.destination] = link
    links: dict[tuple[str, str], LinkTimes] = {}
    for (source, end), own in pairs.items():
        name = f"{source or CLIENT} to {end or CLIENT}"
        single = {ends: _share(home, ends) for ends in own}
        builder.tensor(name, max(each.bytes / single[ends] for ends, each in own.items()), source, [end])
        for ends, each in own.items():
            wire = each.stream_seconds / single[ends]
            latency = max(0.0, each.seconds - wire)
            links[ends] = LinkTimes(latency, {name: wire}, shares_memory=each.transport == Transport.SHARED_MEMORY)
    shares = {name: share for stage in plan.stages for name, share in zip(stage.machines, stage.shares, strict=True)}
    machines = {}
    for predicted in prediction.machines:
        seconds = predicted.alone_seconds, predicted.compute_seconds, predicted.transfer_seconds
        times = StageTimes(*(each / shares[predicted.machine] for each in seconds))
        machines[predicted.machine] = MachineTimes({home[predicted.machine][0]: times}, predicted.cores)
    return Scenario(builder.program(), machines, links)


def scenario_of_problem(problem: Problem, stages: Sequence[Stage]) -> Scenario:
    """What a planning problem says of a plan for it; replicas that are too rare for a turn are left out.

    Raises:
        PlanError: as `tvm_split.planner.search.evaluate`.
    """
    stages = with_turns(stages)
    evaluation, instance = evaluate(problem, stages, by_shares=True), instance_of(problem)
    ordered = _in_order(stages, [load.machine for load in evaluation.loads])
    name_of = {piece: f"stage_{index}" for index, stage in enumerate(ordered) for piece in stage.layers}
    builder = ProgramBuilder()
    for index, stage in enumerate(ordered):
        builder.stage(f"stage_{index}", stage.machines, stage.turns, stage.layers)
    sizes: dict[str, float] = {}
    for number, tensor in enumerate(instance.tensors):
        source = None if tensor.source == instance.client else name_of[instance.pieces[tensor.source]]
        ends = [None if piece == instance.client else name_of[instance.pieces[piece]] for piece in tensor.destinations]
        takers = [end for end in dict.fromkeys(ends) if end != source]
        if takers:
            sizes[f"tensor_{number}"] = tensor.bytes
            builder.tensor(f"tensor_{number}", tensor.bytes, source, takers)
    program = builder.program()
    shares = {load.machine: load.share for load in evaluation.loads}
    cores = {machine.name: machine.cores for machine in problem.machines}
    machines = {
        load.machine: MachineTimes(
            {
                f"stage_{index}": StageTimes(
                    math.fsum(
                        float(instance.times[instance.piece_number[piece], instance.machine_number[load.machine]])
                        for piece in stage.layers
                    ),
                    load.compute_seconds / shares[load.machine] if shares[load.machine] else 0.0,
                )
                for index, stage in enumerate(ordered)
                if load.machine in stage.machines
            },
            cores[load.machine],
        )
        for load in evaluation.loads
    }
    home = [
        route for route in program.routes if CLIENT in (route.source, route.destination) and route.tensor.name in sizes
    ]
    client = math.fsum(
        route.when.share
        * (problem.client_transfer_seconds + sizes[route.tensor.name] * problem.client_transfer_seconds_per_byte)
        for route in home
    )
    return Scenario(program, machines, _links(instance, program, sizes), instance.problem.shared_cores, client)


def with_measured_compute(scenario: Scenario, seconds: Mapping[str, float]) -> Scenario:
    """The scenario with what machines were measured to compute in a stream, in seconds per micro-batch of it.

    What transfers take of them comes on top, as it is predicted; what a single run computes changes by as much.

    Raises:
        PlanError: a machine is not the scenario's.
    """
    machines = dict(scenario.machines)
    for name, measured in seconds.items():
        if name not in machines:
            used = short_list(list(machines))
            raise PlanError(f"machine {name!r} was measured, and the plan does not use it; it uses {used}")
        turns = {stage.name: stage.own_turns.share for stage in scenario.program.stages_on(name)}
        before = machines[name].stages
        expected = math.fsum((each.stream_seconds - each.transfer_seconds) * turns[of] for of, each in before.items())
        ratio = measured / expected if expected > 0 else 1.0
        # Where nothing was expected, all stages take the same.
        more = 0.0 if expected > 0 else measured / math.fsum(turns.values())
        machines[name] = replace(
            machines[name],
            stages={
                stage: replace(
                    each,
                    single_seconds=each.single_seconds * ratio,
                    stream_seconds=(each.stream_seconds - each.transfer_seconds) * ratio + more + each.transfer_seconds,
                )
                for stage, each in before.items()
            },
        )
    return replace(scenario, machines=machines)


def _stage_of(home: Mapping[str, tuple[str, Recurrence]], machine: str) -> str | None:
    return None if machine == CLIENT else home[machine][0]


def _share(home: Mapping[str, tuple[str, Recurrence]], ends: tuple[str, str]) -> float:
    """Of the micro-batches that go from one end to the other."""
    made, needed = (EVERY if end == CLIENT else home[end][1] for end in ends)
    when = made & needed
    return when.share if when else 1.0


def _client_seconds(prediction: Prediction) -> float:
    """What is left of shared cores that the machines do not keep busy."""
    computing = {each.machine: each.compute_seconds * each.cores for each in prediction.machines}
    found = [
        each.busy_seconds - math.fsum(computing.get(name, 0.0) for name in each.machines)
        for each in prediction.shared_cores
        if CLIENT in each.machines
    ]
    return max([0.0, *found])


def _in_order(stages: Sequence[Stage], machines: Sequence[str]) -> list[Stage]:
    """Stages in the order of their machines' loads, which is topological."""
    stage_of = {machine: stage for stage in stages for machine in stage.machines}
    return list({id(stage_of[machine]): stage_of[machine] for machine in machines}.values())


def _links(instance: Instance, program: Program, sizes: Mapping[str, float]) -> dict[tuple[str, str], LinkTimes]:
    number = instance.machine_number | {CLIENT: instance.client}
    wires: dict[tuple[str, str], dict[str, float]] = {}
    for route in program.routes:
        if route.tensor.name in sizes:
            way = instance.seconds_per_byte[number[route.source], number[route.destination]]
            wire = wires.setdefault((route.source, route.destination), {})
            wire[route.tensor.name] = sizes[route.tensor.name] * float(way)
    return {
        (source, end): LinkTimes(float(instance.latency[number[source], number[end]]), wire)
        for (source, end), wire in wires.items()
    }
