"""Prediction beside measurement: for every machine and link of a deployment, and for the whole.

Pure: from a plan, a program, its trace and the moments of its results to values, and from these to advice.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpc_runtime.measurements import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program import Program
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import LinkPrediction, MachinePrediction, Prediction
from tvm_split.report_advice import advice_for
from tvm_split.report_values import Comparison, LinkReport, MachineReport
from tvm_split.run_times import MeasuredRuns, Window

CLOCK_ERROR = 5_000_000
"""Nanoseconds by which the clocks of two machines may seem to differ: half a round trip of a slow link."""


@dataclass(frozen=True)
class DeploymentReport:
    """What was expected and what happened, per micro-batch.

    ``period`` is the time between two results of a stream once the pipeline is full (throughput is its inverse),
    ``latency`` that of a single run. ``runs`` and ``streamed`` count the single runs and the results of streams that
    were measured. ``limiting`` is what the plan says sets the period; empty without a prediction.
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
        report, advice=advice_for(report.period, report.latency, report.machines, report.links, shares)
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
    """Seconds of events by stage, kind and micro-batch."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self._seconds: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for event in events:
            seconds = (event.end_nanoseconds - event.start_nanoseconds) * 1e-9
            self._seconds[event.stage, event.kind][event.sequence] += seconds

    def crossed(self) -> bool:
        """Whether anything went over a link."""
        return any(kind in (RECEIVE, SEND) for _, kind in self._seconds)

    def count(self, stages: Iterable[str]) -> int:
        """Micro-batches that every one of the stages has computed."""
        return min((len(self._seconds.get((stage, COMPUTE), ())) for stage in stages), default=0)

    def median(self, stages: Iterable[str], kind: str) -> float | None:
        """The median over micro-batches of what the stages spent on one together; None if they never did."""
        together: dict[int, float] = defaultdict(float)
        for stage in stages:
            for sequence, seconds in self._seconds.get((stage, kind), {}).items():
                together[sequence] += seconds
        return statistics.median(together.values()) if together else None


def _machine_report(
    program: Program, machine: str, times: _Times, prediction: Prediction | None, *, contended: bool
) -> MachineReport:
    stages = tuple(stage.name for stage in program.stages_on(machine))
    predicted: MachinePrediction | None = None
    if prediction is not None:
        predicted = next((each for each in prediction.machines if each.machine == machine), None)
    compute = None
    if predicted is not None:
        compute = predicted.compute_seconds if contended else predicted.alone_seconds
    return MachineReport(
        machine=machine,
        stages=stages,
        micro_batches=times.count(stages),
        compute=Comparison(compute, times.median(stages, COMPUTE)),
        receive=Comparison(None if predicted is None else predicted.receive_seconds, times.median(stages, RECEIVE)),
        send=Comparison(None if predicted is None else predicted.send_seconds, times.median(stages, SEND)),
    )


def _link_reports(program: Program, times: _Times, prediction: Prediction | None) -> tuple[LinkReport, ...]:
    predicted: Mapping[tuple[str, str], LinkPrediction] = (
        {} if prediction is None else {(each.source, each.destination): each for each in prediction.links}
    )
    crossing: dict[tuple[str, str], int] = defaultdict(int)
    for route in program.routes:
        crossing[route.source, route.destination] += route.tensor.size_bytes
    reports = []
    for (source, destination), size in crossing.items():
        expected = predicted.get((source, destination))
        reports.append(
            LinkReport(
                source,
                destination,
                Comparison(None if expected is None else expected.bytes, float(size) if times.crossed() else None),
                Comparison(
                    None if expected is None else expected.stream_seconds,
                    _wire_seconds(program, times, source, destination),
                ),
            )
        )
    return tuple(reports)


def _wire_seconds(program: Program, times: _Times, source: str, destination: str) -> float | None:
    """The longer of sending and receiving, as far as the events of a stage belong to this link alone."""
    destinations: dict[str, set[str]] = defaultdict(set)
    sources: dict[str, set[str]] = defaultdict(set)
    for route in program.routes:
        for maker in program.producers[route.tensor.name]:
            destinations[maker.name].add(route.destination)
        # A worker books a tensor on the first of its stages that takes it.
        taker = next((s.name for s in program.stages_on(route.destination) if route.tensor in s.inputs), None)
        if taker is not None:
            sources[taker].add(route.source)
    senders = [stage.name for stage in program.stages_on(source) if destination in destinations[stage.name]]
    takers = [stage.name for stage in program.stages_on(destination) if source in sources[stage.name]]
    found = []
    if all(destinations[stage] == {destination} for stage in senders):
        found.append(times.median(senders, SEND))
    if all(sources[stage] == {source} for stage in takers):
        found.append(times.median(takers, RECEIVE))
    return max((seconds for seconds in found if seconds is not None), default=None)
