"""Show a simulated stream, or a solved planning problem, in tables and sentences."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_split.display.performance import performance
from tvm_split.display.view import Table, View, as_json, view
from tvm_split.observing.trace import Trace
from tvm_split.placement.problem import Problem
from tvm_split.placement.solution import Solution
from tvm_split.simulation.scenario import AS_PLANNED, Loss, WhatIf
from tvm_split.simulation.simulate import Latencies, Simulation
from tvm_split.units import bytes_text, count_text, gap_text, seconds_text, short_list

MOST_ROWS = 12
"""The most machines in the table; of more, those that compute most are shown."""


@dataclass(frozen=True)
class SimulatedPlan:
    """A simulation of a plan, its result, and the predicted period and latency."""

    model: str
    simulation: Simulation
    what_if: WhatIf
    predicted_period_seconds: float
    predicted_latency_seconds: float


@as_json.register
def simulation_as_json(result: SimulatedPlan) -> dict[str, Any]:
    """Return the simulation, without its trace, and the prediction as JSON values."""
    content = dataclasses.asdict(dataclasses.replace(result.simulation, trace=Trace("", {})))
    del content["trace"]
    return {
        "model": result.model,
        **content,
        "micro_batches_per_second": result.simulation.micro_batches_per_second,
        "predicted": {
            "period_seconds": result.predicted_period_seconds,
            "latency_seconds": result.predicted_latency_seconds,
        },
        "what_if": dataclasses.asdict(result.what_if),
    }


@view.register
def view_of_bare_simulation(simulation: Simulation, *, details: bool = False) -> View:
    """Return the view of a simulation without its plan's prediction."""
    return view(SimulatedPlan("a stream", simulation, AS_PLANNED, 0.0, 0.0))


@view.register
def view_of_simulation(result: SimulatedPlan, *, details: bool = False) -> View:
    """Return a table of how each machine spent its time, and the throughput and latency beside the prediction."""
    machines = sorted(result.simulation.machines, key=lambda machine: -machine.compute_share)
    rows = [
        (
            machine.machine,
            *(f"{share:.0%}" for share in (machine.compute_share, machine.wait_share, machine.block_share)),
        )
        for machine in machines[:MOST_ROWS]
    ]
    title = f"{result.model}, simulated: {count_text(result.simulation.results, 'result')}"
    table = Table(title, ("machine",), ("compute", "wait", "block"), rows)
    more = len(machines) - MOST_ROWS
    single = result.simulation.single
    columns = {
        "predicted": (result.predicted_period_seconds, result.predicted_latency_seconds),
        "simulated": (result.simulation.period_seconds, None if single is None else single.mean_seconds),
    }
    few = [f"{more} more compute less: --json"] * (more > 0)
    return [table, *few, performance("", columns), *_sentences(result)]


def _sentences(result: SimulatedPlan) -> Iterator[str]:
    simulation = result.simulation
    if simulation.period_seconds == 0:
        yield "Nothing takes any time"
    elif simulation.period_seconds is None and simulation.results == simulation.wanted:
        yield (
            f"The schedule of the replicas repeats after {count_text(simulation.schedule_cycle, 'result')}: a "
            f"throughput needs --micro-batches {2 * simulation.schedule_cycle}"
        )
    if simulation.single is not None:
        yield f"Latency alone: {_latency_text(simulation.single)}"
    if simulation.streamed is not None:
        most = min(simulation.in_flight, simulation.submitted)
        yield f"Latency in the stream, at most {most} in flight: {_latency_text(simulation.streamed)}"
    yield from _loss_lines(result.what_if.losses, simulation)


def _latency_text(latencies: Latencies) -> str:
    percentiles = [
        f"{percentile}% in {seconds_text(value)}" for percentile, value in latencies.percentiles_seconds.items()
    ]
    if len(set(percentiles)) == 1 or latencies.largest_seconds - latencies.mean_seconds < 1e-9 * latencies.mean_seconds:
        return seconds_text(latencies.mean_seconds)
    return f"{seconds_text(latencies.mean_seconds)} on average, {', '.join(percentiles)}"


def _loss_lines(losses: Sequence[Loss], simulation: Simulation) -> list[str]:
    """Return lines about lost machines and their effect; all requested results may arrive nevertheless."""
    lost = [
        f"{loss.machine} is lost at {seconds_text(loss.at_seconds)}"
        for loss in sorted(losses, key=lambda loss: loss.at_seconds)
    ]
    if not lost:
        return []
    last = seconds_text(simulation.seconds)
    if simulation.results >= simulation.wanted:
        return [*lost, f"All {simulation.wanted} results came, the last at {last}: of later ones this says nothing"]
    came = (
        f"{count_text(simulation.results, 'result')} came, the last at {last}"
        if simulation.results
        else "No result came"
    )
    remaining = count_text(simulation.submitted - simulation.results, "micro-batch")
    return [*lost, f"{came}; {remaining} never come out, since no other machine takes over"]


def solution_parts(name: str, problem: Problem, solution: Solution) -> View:
    """Return a table with a row for each machine of each stage of a solved problem, and the lower bound."""
    evaluation = solution.evaluation
    loads = {load.machine: load for load in evaluation.loads}
    limits = {machine.name: machine.memory_bytes for machine in problem.machines}
    rows = []
    for stage in solution.stages:
        for machine, share in zip(stage.machines, stage.shares, strict=True):
            load = loads[machine]
            times = map(seconds_text, (load.compute_seconds, load.receive_seconds, load.send_seconds))
            limit = limits[machine]
            memory = bytes_text(load.memory_bytes) + ("" if limit == math.inf else f" of {bytes_text(limit)}")
            rows.append((machine, short_list(stage.layers), str(len(stage.layers)), f"{share:.0%}", *times, memory))
    title = f"{name}: {count_text(len(solution.stages), 'stage')} for {problem.objective}"
    numbers = ("pieces", "share", "compute", "receive", "send", "memory")
    kind = "period" if problem.objective == "throughput" else "latency"
    return [
        Table(title, ("machine", "names"), numbers, rows),
        performance("", {"predicted": (evaluation.period_seconds, evaluation.latency_seconds)}),
        f"Limited by {evaluation.limiting}",
        f"no plan has a {kind} below {seconds_text(solution.lower_bound_seconds)} (gap {gap_text(solution.gap)}); "
        f"{solution.method}",
        *filter(None, solution.why_no_more_machines.split("; ")),
        *(f"instead, {alternative.name}: {alternative.why}" for alternative in solution.alternatives),
    ]
