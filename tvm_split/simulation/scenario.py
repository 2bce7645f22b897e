"""The input of a simulation: a program as deployed, the times of its machines and links, and deviations from them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rpc_runtime.program.program import Program
from rpc_runtime.program.round_robin import schedule_by_share
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec
from rpc_runtime.transports.transport import memory_of
from tvm_split.cluster.machine import SharedCores
from tvm_split.errors import PlanError
from tvm_split.placement.plan import Plan
from tvm_split.placement.prediction import Prediction
from tvm_split.units import known_names
from tvm_split.values import first_repeated

NOT_COMPILED = BlobSpec("0" * 64, 0)
"""Stands for the library of a stage in a simulated program."""
MOST_SCATTER = 10.0
"""Largest scatter, far above that of real machines; with more, hardly any log-normal duration is near the mean."""
MOST_FACTOR = 1e6


@dataclass(frozen=True)
class StageTimes:
    """Seconds to compute one micro-batch: alone, and in a stream, with contention and the cost of transfers.

    ``transfer_seconds`` is the part of ``stream_seconds`` that transfers take.
    """

    single_seconds: float
    stream_seconds: float
    transfer_seconds: float = 0.0


@dataclass(frozen=True)
class MachineTimes:
    """The times of a machine's stages, by their names, and the number of cores that it computes on."""

    stages: Mapping[str, StageTimes]
    cores: int = 1


@dataclass(frozen=True)
class LinkTimes:
    """The times of a link: ``wire_seconds`` by tensor, sent one at a time, then the latency. Other tensors take 0.

    With shared memory, at most the planned number of micro-batches is in flight; over networks it may grow.
    """

    latency_seconds: float
    wire_seconds: Mapping[str, float]
    shares_memory: bool = False


@dataclass(frozen=True)
class Scenario:
    """A program with its times; ``links`` are by source and destination, and missing links take no time.

    ``client_seconds`` is the time of the client's cores to send and receive one micro-batch of a stream.
    """

    program: Program
    machines: Mapping[str, MachineTimes]
    links: Mapping[tuple[str, str], LinkTimes]
    shared_cores: tuple[SharedCores, ...] = ()
    client_seconds: float = 0.0


@dataclass(frozen=True)
class Slowdown:
    """From ``since_seconds`` on, a machine takes ``factor`` times as long to compute."""

    machine: str
    factor: float
    since_seconds: float = 0.0


@dataclass(frozen=True)
class Loss:
    """From ``at_seconds`` on, a machine neither computes nor communicates."""

    machine: str
    at_seconds: float


@dataclass(frozen=True)
class WhatIf:
    """Deviations from the plan.

    ``compute_scatter`` and ``link_scatter`` are standard deviations of log-normal durations, as shares of the mean;
    ``seed`` is that of the random generator.

    Raises:
        PlanError: a number is out of range, or a machine has two slowdowns or losses.
    """

    slowdowns: tuple[Slowdown, ...] = ()
    losses: tuple[Loss, ...] = ()
    compute_scatter: float = 0.0
    link_scatter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for slowdown in self.slowdowns:
            if not 0 < slowdown.factor <= MOST_FACTOR:
                raise PlanError(
                    f"machine {slowdown.machine!r} is to compute {slowdown.factor} times as long; give more than 0, "
                    f"and at most {MOST_FACTOR:g}, or lose it"
                )
        for what, names in (
            ("slowed", [slowdown.machine for slowdown in self.slowdowns]),
            ("lost", [loss.machine for loss in self.losses]),
        ):
            twice = first_repeated(names)
            if twice is not None:
                raise PlanError(f"machine {twice!r} is to be {what} {names.count(twice)} times; give one")
        for value in (self.compute_scatter, self.link_scatter):
            if not 0 <= value <= MOST_SCATTER:
                raise PlanError(
                    f"a scatter of {value} was asked for; give a share of the mean, like 0.05, of at most "
                    f"{MOST_SCATTER:g}"
                )

    def require_known(self, scenario: Scenario) -> None:
        """Raise a `PlanError` if a named machine is not in the scenario: it does not exist, or it is idle."""
        for name in [*(slowdown.machine for slowdown in self.slowdowns), *(loss.machine for loss in self.losses)]:
            if name not in scenario.machines:
                used = known_names(list(scenario.machines), name)
                raise PlanError(f"the plan does not use a machine named {name!r}; it uses {used}")


AS_PLANNED = WhatIf()
NO_TIME = LinkTimes(0.0, {})


SimulatedTensor = tuple[str, float, str | None, Sequence[str | None]]
"""Name and bytes of a tensor, the stage that makes it, and the stages that take it; None is the client."""


def program_of(
    stages: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]], tensors: Iterable[SimulatedTensor]
) -> Program:
    """The program of stages that are not compiled; ``stages`` has, in topological order, their machines and
    round-robin schedules.

    A stage without inputs or outputs is connected to the client by a tensor of 1 byte.
    """
    whole = list(tensors)
    for stage in stages:
        if not any(stage in consumers for *_, consumers in whole):
            whole.append((f"begin of {stage}", 1, None, (stage,)))
        if not any(stage == producer for _, _, producer, _ in whole):
            whole.append((f"end of {stage}", 1, stage, (None,)))
    spec = {name: TensorSpec(name, (max(round(size), 1),), "uint8") for name, size, *_ in whole}

    def made_by(stage: str | None) -> tuple[TensorSpec, ...]:
        return tuple(spec[name] for name, _, producer, _ in whole if producer == stage)

    def taken_by(stage: str | None) -> tuple[TensorSpec, ...]:
        return tuple(spec[name] for name, *_, consumers in whole if stage in consumers)

    return Program(
        inputs=made_by(None),
        outputs=taken_by(None),
        stages=tuple(
            StageSpec(
                index, name, machine, (), "cpu", NOT_COMPILED, (), taken_by(name), made_by(name), replica, schedule
            )
            for index, (name, (machines, schedule)) in enumerate(stages.items())
            for replica, machine in enumerate(machines)
        ),
    )


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
    times: dict[str, dict[str, StageTimes]] = {}
    for step in prediction.steps:
        values = zip(step.alone_seconds, step.compute_seconds, step.transfer_seconds, strict=True)
        for machine, seconds in zip(step.machines, values, strict=True):
            times.setdefault(machine, {})[step.name] = StageTimes(*seconds)
    consumers: dict[str, list[str | None]] = {}
    for transfer in prediction.transfers:
        consumers.setdefault(transfer.tensor, []).extend(transfer.targets or (None,))
    origins = {
        transfer.tensor: (transfer.bytes, None if transfer.source == CLIENT else transfer.source)
        for transfer in prediction.transfers
    }
    program = program_of(
        {step.name: (step.machines, schedule_by_share(step.shares)) for step in prediction.steps},
        ((tensor, size, source, consumers[tensor]) for tensor, (size, source) in origins.items()),
    )
    cores = {machine.machine: machine.cores for machine in prediction.machines}
    return Scenario(
        program,
        {machine: MachineTimes(stages, cores[machine]) for machine, stages in times.items()},
        _links(prediction, program.routes),
        tuple(SharedCores(shared.machines, shared.cores) for shared in prediction.shared_cores),
        _client_seconds(prediction),
    )


def _links(prediction: Prediction, routes: Iterable[Route]) -> dict[tuple[str, str], LinkTimes]:
    sizes = {transfer.tensor: transfer.bytes for transfer in prediction.transfers}
    predicted = {(link.source, link.destination): link for link in prediction.links}
    sent: dict[tuple[str, str], dict[str, float]] = {}
    averages: dict[tuple[str, str], float] = {}
    for route in routes:
        ends, size = (route.source, route.destination), sizes.get(route.tensor.name)
        if size is None:
            continue
        if ends not in predicted:
            raise PlanError(f"nothing is predicted of the link from {ends[0]} to {ends[1]}; make the plan anew")
        sent.setdefault(ends, {})[route.tensor.name] = size
        averages[ends] = averages.get(ends, 0.0) + size * route.when.share
    links = {}
    for ends, tensors in sent.items():
        link, average = predicted[ends], averages[ends]
        wires = {name: link.stream_seconds * size / average if average else 0.0 for name, size in tensors.items()}
        latency = max(0.0, link.seconds - math.fsum(wires.values()))
        links[ends] = LinkTimes(latency, wires, shares_memory=memory_of(link.transport) == "host")
    return links


def _client_seconds(prediction: Prediction) -> float:
    """Seconds of the client's cores per micro-batch: the load of its shared cores without that of the machines."""
    computing = {machine.machine: machine.compute_seconds * machine.cores for machine in prediction.machines}
    remaining = [
        shared.busy_seconds - math.fsum(computing.get(name, 0.0) for name in shared.machines)
        for shared in prediction.shared_cores
        if CLIENT in shared.machines
    ]
    return max([0.0, *remaining])


def with_measured_compute(scenario: Scenario, seconds: Mapping[str, float]) -> Scenario:
    """The scenario with measured compute times of machines in a stream, in ``seconds`` per micro-batch of the stream.

    The predicted cost of transfers is added to them. The times of a single run are scaled by the same factor.

    Raises:
        PlanError: a machine is not in the scenario.
    """
    machines = dict(scenario.machines)
    for name, measured in seconds.items():
        if name not in machines:
            used = known_names(list(machines), name)
            raise PlanError(f"machine {name!r} was measured, and the plan does not use it; it uses {used}")
        shares = {stage.name: stage.micro_batches.share for stage in scenario.program.stages_on(name)}
        before = machines[name].stages
        expected = math.fsum(
            (times.stream_seconds - times.transfer_seconds) * shares[of] for of, times in before.items()
        )
        ratio = measured / expected if expected > 0 else 1.0
        machines[name] = replace(
            machines[name],
            stages={
                stage: replace(
                    times,
                    single_seconds=times.single_seconds * ratio,
                    stream_seconds=(times.stream_seconds - times.transfer_seconds) * ratio + times.transfer_seconds,
                )
                for stage, times in before.items()
            },
        )
    return replace(scenario, machines=machines)
