"""Run the simulation of a scenario, with a stream of micro-batches and with single ones, and report the results."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import simpy
from pydantic import Field, InstanceOf

from rpc_runtime.client.dispatcher import default_in_flight
from rpc_runtime.program.routes import CLIENT, MachineProgram, Route
from tvm_split.errors import PlanError, required
from tvm_split.observing.trace import Trace, trace_of
from tvm_split.parameters import Count, Natural
from tvm_split.placement.plan import Plan
from tvm_split.progress import StepProgress
from tvm_split.simulation.actors import ACTIVITIES, Client, Clock, Link, Records, Worker
from tvm_split.simulation.processors import Processors
from tvm_split.simulation.scenario import AS_PLANNED, NO_TIME, MachineTimes, Scenario, WhatIf, scenario_of_plan
from tvm_split.units import Shown

MICRO_BATCHES = 300
"""Default length of a stream."""
MOST_MICRO_BATCHES = 100_000
"""Limit of a stream, which bounds time and memory; round-robin schedules repeat after at most a sixth of that."""
MOST_AHEAD = 5000
"""Most additional results to simulate until replicas that run ahead wait for the slowest one."""
SINGLE_RUNS = 50
"""Number of single runs if durations scatter; else the most, one for each micro-batch of the schedules."""
SHOWN_MICRO_BATCHES = 12
"""Number of micro-batches whose trace is kept."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latencies:
    """Statistics of the seconds from submitting a micro-batch to its result."""

    mean_seconds: float
    percentiles_seconds: Mapping[int, float]
    largest_seconds: float


@dataclass(frozen=True)
class MachineUse:
    """Shares of the time in which a machine computed, waited for inputs, and waited for buffer space for its outputs.

    Computing includes waiting for an oversubscribed core.
    """

    machine: str
    compute_share: float
    wait_share: float
    block_share: float


@dataclass(frozen=True, repr=False)
class Simulation(Shown):
    """The result of simulating a stream.

    The stream is fed until the last requested result has come. Period, latencies and uses are those of the second half
    of the results, when the pipeline is full. ``period_seconds`` is None if there are fewer than two results, or that
    half is shorter than ``schedule_cycle``. ``single`` is the latency of micro-batches that run alone.

    Attributes:
        wanted: number of requested results.
        submitted, results: numbers of micro-batches; a submitted one without a result is in flight or lost.
        schedule_cycle: micro-batches after which all round-robin schedules repeat.
        in_flight: the most micro-batches in flight that the runtime, or the caller, allows.
        first_seconds: from the beginning to the first result; None if none came.
        seconds: from the beginning to the last result.
        trace: the first micro-batches of the stream.
    """

    wanted: int
    submitted: int
    results: int
    schedule_cycle: int
    in_flight: int
    first_seconds: float | None
    seconds: float
    period_seconds: float | None
    single: Latencies | None
    streamed: Latencies | None
    machines: tuple[MachineUse, ...]
    trace: Trace = field(default_factory=lambda: Trace("", {}))

    @property
    def micro_batches_per_second(self) -> float | None:
        """Micro-batches per second; None if the period is unknown or 0."""
        return 1.0 / self.period_seconds if self.period_seconds else None


def simulate(
    scenario: Scenario | Plan | str | Path,
    what_if: InstanceOf[WhatIf] = AS_PLANNED,
    *,
    micro_batches: Annotated[Count, Field(le=MOST_MICRO_BATCHES)] | None = None,
    in_flight: Count | None = None,
    shown: Natural = SHOWN_MICRO_BATCHES,
    on_progress: StepProgress | None = None,
) -> Simulation:
    """Simulate a stream of micro-batches, and single micro-batches.

    Args:
        scenario: what is simulated, or a plan with a prediction, or its file.
        micro_batches: number of results; by default `MICRO_BATCHES`, or as many as the round-robin schedules need.
        in_flight: the most micro-batches of a stream in flight; by default as many as the queues hold.
        shown: number of micro-batches whose events are kept.
        on_progress: called with the number of results of the stream.

    Raises:
        PlanError: ``what_if`` names a machine that the plan does not use.
    """
    scenario = Plan.load(scenario) if isinstance(scenario, str | Path) else scenario
    scenario = scenario_of_plan(scenario) if isinstance(scenario, Plan) else scenario
    required(Scenario, scenario, PlanError, "give a plan with a prediction, or its file")
    what_if.require_known(scenario)
    cycle = scenario.program.cycle
    if micro_batches is None:
        # Fast replicas run ahead until the limit in flight is reached; only then do they wait for the slowest one.
        ahead = (in_flight or default_in_flight(scenario.program)) if cycle > 1 else 0
        micro_batches = max(MICRO_BATCHES, 2 * cycle, min(2 * ahead, MOST_AHEAD))
    stream = _Run(scenario, what_if, in_flight, shown, streamed=True, on_progress=on_progress)
    stream.run(micro_batches, feeds=None)
    has_scatter = what_if.compute_scatter or what_if.link_scatter
    return stream.result(_alone(scenario, what_if, SINGLE_RUNS if has_scatter else min(cycle, SINGLE_RUNS)))


def _alone(scenario: Scenario, what_if: WhatIf, runs: int) -> list[float]:
    """Return the latencies of ``runs`` single micro-batches, without losses, with only the slowdowns from the start."""
    slowed = tuple(slowdown for slowdown in what_if.slowdowns if slowdown.since_seconds <= 0)
    chance = replace(what_if, slowdowns=slowed, losses=(), seed=what_if.seed + 1)
    run = _Run(scenario, chance, 1, 0, streamed=False)
    run.run(runs, feeds=runs)
    return run.latencies()


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        what_if: WhatIf,
        in_flight: int | None,
        shown: int,
        *,
        streamed: bool,
        on_progress: StepProgress | None = None,
    ) -> None:
        self._report = on_progress or (lambda what, done, steps: None)
        program = scenario.program
        self._environment = simpy.Environment()
        clock = Clock(self._environment, what_if.seed)
        self._what_if, self._trace = what_if, Records(clock, shown)
        cores = {name: times.cores for name, times in scenario.machines.items()} | {CLIENT: 1}
        processors = Processors(self._environment, scenario.shared_cores if streamed else (), cores)
        touching: defaultdict[str, list[Route]] = defaultdict(list)
        between: defaultdict[tuple[str, str], list[Route]] = defaultdict(list)
        for route in program.handovers:
            for end in {route.source, route.destination}:
                touching[end].append(route)
            if route.source != route.destination:
                between[route.source, route.destination].append(route)
        self._limit = default_in_flight(program) if in_flight is None else in_flight
        self._client = Client(
            clock,
            program,
            MachineProgram.of(CLIENT, (), touching[CLIENT]),
            processors,
            self._limit,
            scenario.client_seconds if streamed else 0.0,
            self._look,
        )
        self.workers = {
            name: Worker(
                clock,
                self._trace,
                MachineProgram.of(name, program.stages_on(name), touching[name]),
                processors,
                self._seconds_of(name, scenario.machines[name], streamed=streamed),
                what_if.compute_scatter,
            )
            for name in program.machines
        }
        ends: dict[str, Client | Worker] = {CLIENT: self._client, **self.workers}
        self.links = {
            (source, end): Link(
                clock,
                routes,
                scenario.links.get((source, end), NO_TIME),
                what_if.link_scatter,
                ends[source],
                ends[end],
            )
            for (source, end), routes in between.items()
        }
        leaving: defaultdict[str, dict[str, Link]] = defaultdict(dict)
        for (source, end), link in self.links.items():
            leaving[source][end] = link
        for name, actor in ends.items():
            actor.connect(leaving[name])
        self._half = 0
        self._looks: list[tuple[float, dict[str, dict[str, float]]]] = []

    def run(self, results: int, feeds: int | None) -> None:
        """Run until ``results`` results have come or no event is left; feed ``feeds`` micro-batches, or without end."""
        self._half, self._last = (results + 1) // 2, results
        for link in self.links.values():
            self._environment.process(link.run())
        for worker in self.workers.values():
            self._environment.process(worker.run())
        self._environment.process(self._client.feed(feeds))
        # A loss after the last event has no effect.
        losses = sorted(self._what_if.losses, key=lambda loss: -loss.at_seconds)
        while len(self._client.done) < results and (moment := self._environment.peek()) < math.inf:
            while losses and losses[-1].at_seconds <= moment:
                loss = losses.pop()
                self.workers[loss.machine].lose(loss.at_seconds)
                for ends, link in self.links.items():
                    link.is_cut |= loss.machine in ends
            self._environment.step()

    def latencies(self, first: int = 0) -> list[float]:
        """Seconds from submission to result, of the results from number ``first`` on."""
        pairs = zip(self._client.submitted, self._client.done[: self._last], strict=False)
        return [end - start for start, end in list(pairs)[first:]]

    def result(self, alone: list[float]) -> Simulation:
        done = self._client.done[: self._last]  # more results may come at the same time
        half = len(done) // 2
        # With replicas, only whole cycles of the round-robin schedules have a constant duration.
        cycle = self._client.program.cycle
        whole = (len(done) - max(half, 1)) // cycle * cycle
        first = len(done) - 1 - whole
        return Simulation(
            wanted=self._last,
            submitted=len(self._client.submitted),
            results=len(done),
            schedule_cycle=cycle,
            in_flight=self._limit,
            first_seconds=done[0] if done else None,
            seconds=done[-1] if done else 0.0,
            period_seconds=(done[-1] - done[first]) / whole if whole > 0 else None,
            single=_latencies(alone),
            streamed=_latencies(self.latencies(half)),
            machines=self._uses(),
            trace=trace_of("simulation", self._trace.observe(), {}),
        )

    def _look(self, results: int) -> None:
        self._report("simulating", results, self._last)
        if results in (self._half, self._last):
            self._looks.append(self._now())

    def _now(self) -> tuple[float, dict[str, dict[str, float]]]:
        """Return the simulated time, and by machine and activity the seconds that the machine has spent until then."""
        return self._environment.now, {name: worker.spent() for name, worker in self.workers.items()}

    def _uses(self) -> tuple[MachineUse, ...]:
        looks = self._looks
        # Use the whole time if a loss ended the stream, there was only one result, or all came at the same time.
        if len(looks) < 2 or looks[0] == looks[1]:
            looks = [(0.0, dict.fromkeys(self.workers, dict.fromkeys(ACTIVITIES, 0.0))), self._now()]
        (begin, before), (end, after) = looks
        whole = end - begin
        return tuple(
            MachineUse(
                name, *((after[name][what] - before[name][what]) / whole if whole > 0 else 0.0 for what in ACTIVITIES)
            )
            for name in self.workers
        )

    def _seconds_of(self, machine: str, times: MachineTimes, *, streamed: bool) -> Callable[[str, float], float]:
        slowdowns = [slowdown for slowdown in self._what_if.slowdowns if slowdown.machine == machine]
        seconds = {
            stage: stage_times.stream_seconds if streamed else stage_times.single_seconds
            for stage, stage_times in times.stages.items()
        }

        def at(stage: str, moment: float) -> float:
            return seconds[stage] * math.prod(
                slowdown.factor for slowdown in slowdowns if slowdown.since_seconds <= moment
            )

        return at


def _latencies(seconds: list[float]) -> Latencies | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    nearest = {
        percentile: ordered[max(math.ceil(percentile / 100 * len(ordered)), 1) - 1] for percentile in PERCENTILES
    }
    return Latencies(statistics.fmean(ordered), nearest, ordered[-1])
