"""Prediction beside measurement: for every machine and link of a deployment, and for the whole.

Pure: from a plan, a program, its trace and the moments of its results to values, and from these to advice.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm_split.deployment.report_advice import advice_for
from tvm_split.deployment.report_values import Comparison, LinkReport, MachineReport
from tvm_split.deployment.run_times import MeasuredRuns, Window
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import Corrections, LinkPrediction, MachinePrediction, Prediction
from tvm_split.rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, TraceEvent
from tvm_split.rpc_runtime.program.program import Program, Route, StageSpec
from tvm_split.rpc_runtime.program.turns import Recurrence

CLOCK_ERROR = 5_000_000
"""Nanoseconds by which the clocks of two machines may seem to differ: half a round trip of a slow link."""


@dataclass(frozen=True)
class DeploymentReport:
    """What was expected and what happened, per micro-batch.

    ``period`` is the time between two results of a stream once the pipeline is full (throughput is its inverse),
    ``latency`` that of a single run. ``runs`` and ``streamed`` count the single runs and the results of streams that
    were measured. ``limiting`` is what the plan says sets the period; empty without a prediction. ``profiled_at`` and
    ``corrections`` are those of the prediction, for planning anew.
    """

    model: str
    origin: str
    limiting: str
    period: Comparison
    latency: Comparison
    machines: tuple[MachineReport, ...]
    links: tuple[LinkReport, ...]
    runs: int
    streamed: int
    advice: tuple[str, ...]
    profiled_at: float | None = None
    corrections: Corrections = field(default_factory=Corrections)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it; each comparison also has its ratio, measured by predicted."""
        return {
            "model": self.model,
            "origin": self.origin,
            "limiting": self.limiting,
            "period_seconds": self.period.to_dict(),
            "latency_seconds": self.latency.to_dict(),
            "machines": [
                {
                    "machine": each.machine,
                    "stages": list(each.stages),
                    "shares": list(each.shares),
                    "micro_batches": each.micro_batches,
                    "compute_seconds": each.compute.to_dict(),
                    "receive_seconds": each.receive.to_dict(),
                    "send_seconds": each.send.to_dict(),
                }
                for each in self.machines
            ],
            "links": [
                {
                    "source": each.source,
                    "destination": each.destination,
                    "bytes": each.bytes.to_dict(),
                    "seconds": each.seconds.to_dict(),
                }
                for each in self.links
            ],
            "runs": self.runs,
            "streamed": self.streamed,
            "advice": list(self.advice),
            "profiled_at": self.profiled_at,
            "corrections": dataclasses.asdict(self.corrections),
        }


def report_of(plan: Plan, program: Program, trace: Sequence[TraceEvent], measured: MeasuredRuns) -> DeploymentReport:
    """Compare what ``plan`` predicts with what ``trace`` and ``measured`` say.

    Machines and links are measured in the steady part of streams, where every machine is busy, and compared with what
    is predicted for that. Where nothing was streamed, single runs stand in, compared with computing alone.
    """
    prediction = plan.prediction
    windows = measured.streams or _around(measured.runs)
    times = _Times(_begun_in(windows, trace))
    machines = tuple(
        _machine_report(program, machine, times, prediction, contended=bool(measured.streams))
        for machine in program.machines
    )
    report = DeploymentReport(
        model=plan.model,
        origin=plan.origin,
        limiting="" if prediction is None else prediction.limiting,
        period=Comparison(None if prediction is None else prediction.period_seconds, measured.period_seconds),
        latency=Comparison(None if prediction is None else prediction.latency_seconds, measured.latency_seconds),
        machines=machines,
        links=_link_reports(program, times, prediction),
        runs=len(measured.runs),
        streamed=measured.streamed,
        advice=(),
    )
    if prediction is None:
        return report
    shares = {each.machine: each.estimated_share for each in prediction.machines}
    return dataclasses.replace(
        report,
        advice=advice_for(report.period, report.latency, report.machines, report.links, shares),
        profiled_at=prediction.profiled_at,
        corrections=prediction.corrections,
    )


def _around(runs: Sequence[Window]) -> tuple[Window, ...]:
    """One window around all runs: single ones are so short that the error of other machines' clocks would tell."""
    if not runs:
        return ()
    start, end = min(run.start for run in runs), max(run.end for run in runs)
    return (Window(start - CLOCK_ERROR, end + CLOCK_ERROR, len(runs)),)


def _begun_in(windows: Sequence[Window], events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """The events that begin in one of the windows, which do not overlap.

    Sending may end after the result has arrived: it ends when the sender is asked for more.
    """
    ordered = sorted(windows, key=lambda window: window.start)
    starts = [window.start for window in ordered]
    for event in events:
        position = bisect.bisect_right(starts, event.start_nanoseconds) - 1
        if position >= 0 and event.start_nanoseconds <= ordered[position].end:
            yield event


class _Times:
    """Seconds of events by machine, stage, kind and micro-batch."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self._seconds: dict[tuple[str, str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for event in events:
            seconds = (event.end_nanoseconds - event.start_nanoseconds) * 1e-9
            self._seconds[event.machine, event.stage, event.kind][event.sequence] += seconds

    def crossed(self) -> bool:
        """Whether anything went over a link."""
        return any(kind in (RECEIVE, SEND) for _, _, kind in self._seconds)

    def count(self, machine: str, stages: Iterable[str]) -> int:
        """Micro-batches that the machine has computed in every one of the stages."""
        return min((len(self._seconds.get((machine, stage, COMPUTE), ())) for stage in stages), default=0)

    def median(self, machine: str, stages: Iterable[str], kind: str, when: Recurrence) -> float | None:
        """The median over the micro-batches of ``when`` of what the stages spent on one together, times their share.

        That is what a micro-batch of the whole stream costs on average; None if the machine never did it.
        """
        summed: dict[int, float] = defaultdict(float)
        for stage in stages:
            for sequence, seconds in self._seconds.get((machine, stage, kind), {}).items():
                if sequence in when:
                    summed[sequence] += seconds
        return statistics.median(summed.values()) * when.share if summed else None

    def of_machine(self, stages: Iterable[StageSpec], kind: str) -> float | None:
        """What a machine's stages spend on a micro-batch of the stream; those with the same turns are taken together.

        (The sums over micro-batches that not all of the stages compute have no median that says anything.)
        """
        groups: dict[Recurrence, list[StageSpec]] = defaultdict(list)
        for stage in stages:
            groups[stage.own_turns].append(stage)
        found = [
            self.median(members[0].machine, [stage.name for stage in members], kind, when)
            for when, members in groups.items()
        ]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if known else None


def _machine_report(
    program: Program, machine: str, times: _Times, prediction: Prediction | None, *, contended: bool
) -> MachineReport:
    stages = program.stages_on(machine)
    names = tuple(stage.name for stage in stages)
    predicted: MachinePrediction | None = None
    if prediction is not None:
        predicted = next((each for each in prediction.machines if each.machine == machine), None)
    measured = times.of_machine(stages, COMPUTE)
    compute = None
    if predicted is not None:
        compute = _expected_compute(predicted, measured) if contended else predicted.alone_seconds
    return MachineReport(
        machine=machine,
        stages=names,
        shares=tuple(stage.own_turns.share for stage in stages),
        micro_batches=times.count(machine, names),
        compute=Comparison(compute, measured),
        receive=Comparison(None if predicted is None else predicted.receive_seconds, times.of_machine(stages, RECEIVE)),
        send=Comparison(None if predicted is None else predicted.send_seconds, times.of_machine(stages, SEND)),
    )


def _expected_compute(predicted: MachinePrediction, measured: float | None) -> float:
    """Computing with what serialising takes from it, or without, whichever is nearer, or in between.

    Serialising falls into the time of computing only as far as the machine has no pauses for it.
    """
    if measured is None:
        return predicted.compute_seconds
    return min(max(measured, predicted.compute_seconds - predicted.transfer_seconds), predicted.compute_seconds)


def _link_reports(program: Program, times: _Times, prediction: Prediction | None) -> tuple[LinkReport, ...]:
    predicted: Mapping[tuple[str, str], LinkPrediction] = (
        {} if prediction is None else {(each.source, each.destination): each for each in prediction.links}
    )
    crossing: dict[tuple[str, str], float] = defaultdict(float)
    for route in program.routes:
        crossing[route.source, route.destination] += route.tensor.size_bytes * route.when.share
    reports = []
    for (source, destination), size in crossing.items():
        expected = predicted.get((source, destination))
        reports.append(
            LinkReport(
                source,
                destination,
                Comparison(None if expected is None else expected.bytes, size if times.crossed() else None),
                Comparison(
                    None if expected is None else expected.stream_seconds,
                    _wire_seconds(program, times, source, destination),
                ),
            )
        )
    return tuple(reports)


def _wire_seconds(program: Program, times: _Times, source: str, destination: str) -> float | None:
    """The longer of sending and receiving, as far as the events of a stage belong to this link alone."""
    link = [route for route in program.routes if (route.source, route.destination) == (source, destination)]
    when = functools.reduce(operator.or_, (route.when for route in link))
    sent = [(route, _maker(program, route)) for route in program.routes if route.source == source]
    taken = [(route, _taker(program, route)) for route in program.routes if route.destination == destination]
    found = []
    for machine, kind, booked in ((source, SEND, sent), (destination, RECEIVE, taken)):
        stages = {stage for route, stage in booked if route in link and stage is not None}
        others = [route for route, stage in booked if stage in stages and route not in link]
        if not any(other.when & when for other in others):
            found.append(times.median(machine, stages, kind, when))
    return max((seconds for seconds in found if seconds is not None), default=None)


def _maker(program: Program, route: Route) -> str | None:
    """The stage on which sending is booked; None for the client."""
    return next((stage.name for stage in program.producers[route.tensor.name] if stage.machine == route.source), None)


def _taker(program: Program, route: Route) -> str | None:
    """The stage on which receiving is booked, the first on its machine that takes the tensor; None for the client."""
    stages = program.stages_on(route.destination)
    return next((stage.name for stage in stages if route.tensor in stage.inputs), None)
