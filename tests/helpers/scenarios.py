"""Scenarios written by hand: a chain of stages, each on one machine or on replicas; and the lower bound of a period."""

import math
from collections.abc import Sequence

from rpc_runtime.program.routes import CLIENT
from tvm_split.placement.prediction import predict
from tvm_split.placement.problem import Problem, Stage
from tvm_split.placement.search.candidate import with_schedule_shares
from tvm_split.placement.solution import solution_of
from tvm_split.simulation.scenario import LinkTimes, MachineTimes, Scenario, StageTimes, program_of, scenario_of


def scenario_of_problem(problem: Problem, stages: Sequence[Stage]) -> Scenario:
    """Return the scenario of stages for a planning problem, with the replicas' shares of the round-robin schedule."""
    return scenario_of(predict(problem, solution_of(problem, with_schedule_shares(stages))))


def chain(
    computing: Sequence[float],
    wires: Sequence[float],
    latencies: Sequence[float] | None = None,
    *,
    replicas: int = 1,
    shares_memory: bool = False,
) -> Scenario:
    """Return a chain of stages with these computing times, and links before, between and behind them."""
    latencies = [0.0] * len(wires) if latencies is None else latencies
    names = [[f"m{index}{'abc'[number]}" for number in range(replicas)] for index in range(len(computing))]
    stages = {f"stage_{index}": (tuple(machines), tuple(range(replicas))) for index, machines in enumerate(names)}
    ends: list[str | None] = [None, *stages, None]
    tensors = [(f"tensor_{number}", 8, ends[number], [ends[number + 1]]) for number in range(len(wires))]
    places = [[CLIENT], *names, [CLIENT]]
    links = {}
    for number, (wire, latency) in enumerate(zip(wires, latencies, strict=True)):
        for source in places[number]:
            for end in places[number + 1]:
                links[source, end] = LinkTimes(latency, {f"tensor_{number}": wire}, shares_memory)
    machines = {
        name: MachineTimes({f"stage_{index}": StageTimes(seconds, seconds)})
        for index, (machine_names, seconds) in enumerate(zip(names, computing, strict=True))
        for name in machine_names
    }
    return Scenario(program_of(stages, tensors), machines, links)


def busiest(scenario: Scenario) -> float:
    """Return a lower bound of the period: the average time that the busiest machine, link or cores need per result."""
    computing = dict.fromkeys(scenario.machines, 0.0)
    for stage in scenario.program.stages:
        seconds = scenario.machines[stage.machine].stages[stage.name].stream_seconds
        computing[stage.machine] += seconds * stage.micro_batches.share
    wires = []
    for (source, end), times in scenario.links.items():
        routes = [route for route in scenario.program.routes if (route.source, route.destination) == (source, end)]
        wires.append(math.fsum(times.wire_seconds.get(route.tensor.name, 0.0) * route.when.share for route in routes))
    cores = [
        math.fsum(computing[name] * scenario.machines[name].cores for name in group.machines if name in computing)
        / group.cores
        for group in scenario.shared_cores
    ]
    return max([*computing.values(), *wires, *cores])
