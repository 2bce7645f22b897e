"""Build the scenario of a prediction: from predicted steps, links and machines to a program with its times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.turns import EVERY, Recurrence, turns_by_share, turns_of
from rpc_runtime.transports.transport import memory_of
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import LinkPrediction, Prediction, StepPrediction
from tvm_split.simulation.scenario import LinkTimes, MachineTimes, ProgramBuilder, Scenario, StageTimes
from tvm_split.units import short_list


def scenario_of_plan(plan: Plan) -> Scenario:
    """The scenario of a plan's prediction.

    Raises:
        PlanError: the plan has no prediction, or one for other machines than the plan's.
    """
    prediction = plan.prediction
    if prediction is None:
        raise PlanError(
            "the plan has no prediction, so nothing is known of its times; make one with `tvm-split plan`, of a split "
            "by hand with --predict"
        )
    machines = {name for stage in plan.stages for name in stage.machines}
    if machines != {name for step in prediction.steps for name in step.machines}:
        raise PlanError("the plan's prediction is of other machines than its stages; make the plan anew")
    return scenario_of(prediction)


def scenario_of(prediction: Prediction) -> Scenario:
    """The scenario of a prediction, with a stage for each step, as in the compiled plan, and each tensor on its own.

    A link's seconds are divided over its tensors in proportion to their bytes.
    """
    builder = ProgramBuilder()
    times: dict[str, dict[str, StageTimes]] = {}
    for step in prediction.steps:
        builder.stage(step.name, step.machines, turns_by_share(step.shares))
        for place, machine in enumerate(step.machines):
            seconds = step.alone_seconds[place], step.compute_seconds[place], step.transfer_seconds[place]
            times.setdefault(machine, {})[step.name] = StageTimes(*seconds)
    tensors: dict[tuple[str, str], list[str | None]] = {}
    sizes: dict[tuple[str, str], float] = {}
    for transfer in prediction.transfers:
        key = transfer.source, transfer.tensor
        tensors.setdefault(key, []).extend(transfer.targets or (None,))
        sizes[key] = transfer.bytes
    for (source, tensor), targets in tensors.items():
        builder.tensor(tensor, sizes[source, tensor], None if source == CLIENT else source, targets)
    cores = {each.machine: each.cores for each in prediction.machines}
    return Scenario(
        builder.program(),
        {machine: MachineTimes(stages, cores[machine]) for machine, stages in times.items()},
        _links(prediction),
        tuple(SharedCores(each.machines, each.cores) for each in prediction.shared_cores),
        _client_seconds(prediction),
    )


def _links(prediction: Prediction) -> dict[tuple[str, str], LinkTimes]:
    steps = {step.name: step for step in prediction.steps}
    crossing: dict[tuple[str, str], dict[str, float]] = {}
    shares: dict[tuple[str, str], float] = {}
    for transfer in prediction.transfers:
        target = transfer.targets[0] if transfer.targets else CLIENT
        for source, made in _turns(steps.get(transfer.source)):
            for end, needed in _turns(steps.get(target)):
                when = made & needed
                if source != end and when is not None:
                    crossing.setdefault((source, end), {})[transfer.tensor] = transfer.bytes
                    shares[source, end] = when.share
    predicted = {(each.source, each.destination): each for each in prediction.links}
    lacking = next((ends for ends in crossing if ends not in predicted), None)
    if lacking is not None:
        raise PlanError(f"nothing is predicted of the link from {lacking[0]} to {lacking[1]}; make the plan anew")
    return {ends: _link(predicted[ends], sizes, shares[ends]) for ends, sizes in crossing.items()}


def _turns(step: StepPrediction | None) -> list[tuple[str, Recurrence]]:
    """Each machine of a step (or the client) with the micro-batches that it computes."""
    if step is None:
        return [(CLIENT, EVERY)]
    turns = turns_by_share(step.shares)
    return [(machine, turns_of(place, turns)) for place, machine in enumerate(step.machines)]


def _link(link: LinkPrediction, sizes: Mapping[str, float], share: float) -> LinkTimes:
    """The times of a link that transfers tensors of these sizes for a ``share`` of the micro-batches."""
    whole, stream = math.fsum(sizes.values()), link.stream_seconds / share
    wires = {tensor: stream * (size / whole if whole else 0.0) for tensor, size in sizes.items()}
    latency = max(0.0, link.seconds - stream)
    return LinkTimes(latency, wires, shares_memory=memory_of(link.transport) == "host")


def _client_seconds(prediction: Prediction) -> float:
    """Seconds of the client's cores per micro-batch: the load of its shared cores without that of the machines."""
    computing = {each.machine: each.compute_seconds * each.cores for each in prediction.machines}
    left = [
        each.busy_seconds - math.fsum(computing.get(name, 0.0) for name in each.machines)
        for each in prediction.shared_cores
        if CLIENT in each.machines
    ]
    return max([0.0, *left])


def with_measured_compute(scenario: Scenario, seconds: Mapping[str, float]) -> Scenario:
    """The scenario with measured compute times of machines in a stream, in ``seconds`` per micro-batch of the stream.

    The predicted cost of transfers is added to them. The times of a single run are scaled by the same factor.

    Raises:
        PlanError: a machine is not in the scenario.
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
        # If nothing was predicted, all stages get the same time.
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
