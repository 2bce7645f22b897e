"""Compare prediction and measurement for every machine and link of a deployment, and for the whole.

Pure functions: from a plan, a program, its trace and the times of its results to values, and from these to advice.
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
from types import MappingProxyType
from typing import Annotated, Any, cast

from pydantic import Field, TypeAdapter

from rpc_runtime.program.codecs import NONE
from rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program.program import Program, StageSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.program.turns import Recurrence
from rpc_runtime.transports.transport import uses_codecs
from tvm_split.deployment.report_advice import advice_for
from tvm_split.deployment.report_values import Comparison, LinkReport, MachineReport
from tvm_split.deployment.run_times import MeasuredRuns, Window
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import LinkPrediction, MachinePrediction, Prediction
from tvm_split.planner.profile import Corrections
from tvm_split.shown import Shown

CLOCK_ERROR = 5_000_000
"""Largest apparent difference between the clocks of two machines, in nanoseconds: half a round trip of a slow link."""


@dataclass(frozen=True)
class DeploymentReport(Shown):
    """Predictions and measurements of a deployment, per micro-batch.

    ``period`` is the time between two results of a stream once the pipeline is full (throughput is its inverse),
    ``latency`` is the time of a single run. ``runs`` and ``streamed`` count the single runs and the results of streams
    that were measured. ``limiting`` is the predicted bottleneck, which sets the period; empty without a prediction.
    ``profiled_at`` and ``corrections`` are those of the prediction, for planning again. In JSON the names of values in
    seconds end in ``_seconds``.
    """

    model: str
    origin: str
    limiting: str
    period: Annotated[Comparison, Field(alias="period_seconds")]
    latency: Annotated[Comparison, Field(alias="latency_seconds")]
    machines: tuple[MachineReport, ...]
    links: tuple[LinkReport, ...]
    runs: int
    streamed: int
    advice: tuple[str, ...]
    profiled_at: float | None = None
    corrections: Corrections = field(default_factory=Corrections)

    def to_dict(self) -> dict[str, Any]:
        """The report as values for JSON; each comparison also has its ratio, measured by predicted."""
        return cast(dict[str, Any], _REPORT.dump_python(self, mode="json", by_alias=True))


_REPORT = TypeAdapter(DeploymentReport)


def report_of(
    plan: Plan,
    program: Program,
    trace: Sequence[TraceEvent],
    measured: MeasuredRuns,
    carried: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> DeploymentReport:
    """Compare the prediction of ``plan`` with ``trace`` and ``measured``; ``carried`` has the transport of each link.

    Machines and links are measured in the steady part of streams, where every machine is busy, and compared with the
    prediction for streams. Without streams, single runs are compared with the prediction for one input alone.
    """
    prediction = plan.prediction
    windows = measured.streams or _around(measured.runs)
    times = _Times(_begun_in(windows, trace))
    links = _link_reports(program, times, prediction, carried)
    machines = tuple(
        _machine_report(program, machine, times, prediction, links, contended=bool(measured.streams))
        for machine in program.machines
    )
    report = DeploymentReport(
        model=plan.model,
        origin=plan.origin,
        limiting="" if prediction is None else prediction.limiting,
        period=Comparison(None if prediction is None else prediction.period_seconds, measured.period_seconds),
        latency=Comparison(None if prediction is None else prediction.latency_seconds, measured.latency_seconds),
        machines=machines,
        links=links,
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
    """One window around all runs: a single run is so short that the error of other machines' clocks would matter."""
    if not runs:
        return ()
    start, end = min(run.start for run in runs), max(run.end for run in runs)
    return (Window(start - CLOCK_ERROR, end + CLOCK_ERROR, len(runs)),)


def _begun_in(windows: Sequence[Window], events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """The events that begin in one of the windows, which do not overlap.

    The end does not matter, because sending may end after the result has arrived: it ends when the sender is asked for
    more.
    """
    ordered = sorted(windows, key=lambda window: window.start)
    starts = [window.start for window in ordered]
    for event in events:
        position = bisect.bisect_right(starts, event.start_nanoseconds) - 1
        if position >= 0 and event.start_nanoseconds <= ordered[position].end:
            yield event


class _Times:
    """Seconds and bytes of trace events, by machine, stage and kind, then by micro-batch."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self.seconds: dict[tuple[str, str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.bytes: dict[tuple[str, str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for event in events:
            seconds = (event.end_nanoseconds - event.start_nanoseconds) * 1e-9
            self.seconds[event.machine, event.stage, event.kind][event.sequence] += seconds
            self.bytes[event.machine, event.stage, event.kind][event.sequence] += event.size_bytes

    def crossed(self) -> bool:
        """Whether there was any transfer over a link."""
        return any(kind in (RECEIVE, SEND) for _, _, kind in self.seconds)

    def count(self, machine: str, stages: Iterable[str]) -> int:
        """Number of micro-batches that the machine has computed in every one of the stages."""
        return min((len(self.seconds.get((machine, stage, COMPUTE), ())) for stage in stages), default=0)

    def of_machine(self, stages: Iterable[StageSpec], kind: str) -> float | None:
        """Seconds of a machine's stages per micro-batch of the stream; None if there are no events.

        Stages with the same round-robin schedule are summed before the median: a median over micro-batches that only
        some of the stages compute would be meaningless.
        """
        groups: dict[Recurrence, list[StageSpec]] = defaultdict(list)
        for stage in stages:
            groups[stage.own_turns].append(stage)
        found = [
            _median(self.seconds, members[0].machine, [stage.name for stage in members], kind, when)
            for when, members in groups.items()
        ]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if known else None


def _median(
    values: Mapping[tuple[str, str, str], Mapping[int, float]],
    machine: str,
    stages: Iterable[str],
    kind: str,
    when: Recurrence,
) -> float | None:
    """The median, over the micro-batches of ``when``, of the sum over the stages, times the share of ``when``.

    This is the average cost per micro-batch of the whole stream; None if the machine has no such events.
    """
    summed: dict[int, float] = defaultdict(float)
    for stage in stages:
        for sequence, value in values.get((machine, stage, kind), {}).items():
            if sequence in when:
                summed[sequence] += value
    return statistics.median(summed.values()) * when.share if summed else None


def _machine_report(
    program: Program,
    machine: str,
    times: _Times,
    prediction: Prediction | None,
    links: Sequence[LinkReport],
    *,
    contended: bool,
) -> MachineReport:
    stages = program.stages_on(machine)
    names = tuple(stage.name for stage in stages)
    predicted: MachinePrediction | None = None
    if prediction is not None:
        predicted = next((each for each in prediction.machines if each.machine == machine), None)
    expected = least = None
    if prediction is not None and predicted is not None:
        # If cores are oversubscribed, the measurement includes waiting for a core while others compute.
        oversubscription = max(
            [1.0, *(each.oversubscription for each in prediction.shared_cores if machine in each.machines)]
        )
        expected = predicted.compute_seconds * oversubscription if contended else predicted.alone_seconds
        if contended and (predicted.transfer_seconds or oversubscription > 1):
            least = predicted.compute_seconds - predicted.transfer_seconds
    received = sum(link.seconds.spread for link in links if link.destination == machine)
    sent = sum(link.seconds.spread for link in links if link.source == machine)
    return MachineReport(
        machine=machine,
        stages=names,
        shares=tuple(stage.own_turns.share for stage in stages),
        micro_batches=times.count(machine, names),
        compute=Comparison(expected, times.of_machine(stages, COMPUTE), least),
        receive=_range(
            None if predicted is None else predicted.receive_seconds, times.of_machine(stages, RECEIVE), received
        ),
        send=_range(None if predicted is None else predicted.send_seconds, times.of_machine(stages, SEND), sent),
    )


def _range(least: float | None, measured: float | None, spread: float) -> Comparison:
    """The comparison of wire times with a range: from ``least``, the bytes alone, to a single transfer with latency.

    In a stream latencies overlap, unless the ends are busy with other work.
    """
    if least is None or not spread:
        return Comparison(least, measured)
    return Comparison(least + spread, measured, least)


def _link_reports(
    program: Program, times: _Times, prediction: Prediction | None, carried: Mapping[tuple[str, str], str]
) -> tuple[LinkReport, ...]:
    predicted: Mapping[tuple[str, str], LinkPrediction] = (
        {} if prediction is None else {(each.source, each.destination): each for each in prediction.links}
    )
    reports = []
    for source, destination in dict.fromkeys((route.source, route.destination) for route in program.routes):
        expected = predicted.get((source, destination))
        routes = _routes(program, source, destination)
        when = functools.reduce(operator.or_, (route.when for route in routes))
        reports.append(
            LinkReport(
                source,
                destination,
                Comparison(
                    None if expected is None else expected.bytes,
                    _wire_bytes(program, times, source, destination, when),
                ),
                _range(
                    None if expected is None else expected.stream_seconds,
                    _wire_seconds(program, times, source, destination, when),
                    0.0 if expected is None else max(0.0, expected.seconds * when.share - expected.stream_seconds),
                ),
                carried.get((source, destination), ""),
                _codecs(routes, carried.get((source, destination), "")),
            )
        )
    return tuple(reports)


def _codecs(routes: Sequence[Route], transport: str) -> tuple[str, ...]:
    """The codecs of the tensors on a link; none if its ends share memory, or it connects GPUs directly."""
    if not uses_codecs(transport):
        return ()
    return tuple(dict.fromkeys(route.codec for route in routes if route.codec != NONE))


def _routes(program: Program, source: str, destination: str) -> list[Route]:
    return [route for route in program.routes if (route.source, route.destination) == (source, destination)]


def _wire_seconds(program: Program, times: _Times, source: str, destination: str, when: Recurrence) -> float | None:
    """Seconds of the slower end of a link; ends whose events also belong to other links are left out."""
    found = (_median(times.seconds, *booked, when) for booked in _booked(program, source, destination, when))
    return max((seconds for seconds in found if seconds is not None), default=None)


def _wire_bytes(program: Program, times: _Times, source: str, destination: str, when: Recurrence) -> float | None:
    """Bytes sent over the link, as measured at one of its ends; if neither end can tell, the size of the tensors.

    None if neither is known: nothing was transferred, or tensors have codecs.
    """
    found = (_median(times.bytes, *booked, when) for booked in _booked(program, source, destination, when))
    routes = _routes(program, source, destination)
    whole = sum(each.tensor.size_bytes * each.when.share for each in routes)
    is_known = times.crossed() and all(each.codec == NONE for each in routes)
    return next((size for size in found if size), whole if is_known else None)


def _booked(program: Program, source: str, destination: str, when: Recurrence) -> Iterator[tuple[str, set[str], str]]:
    """The ends of a link whose events belong to this link alone: machine, stages, and kind of the events."""
    link = _routes(program, source, destination)
    sent = [(route, _maker(program, route)) for route in program.routes if route.source == source]
    taken = [(route, _taker(program, route)) for route in program.routes if route.destination == destination]
    for machine, kind, booked in ((source, SEND, sent), (destination, RECEIVE, taken)):
        stages = {stage for route, stage in booked if route in link and stage is not None}
        others = [route for route, stage in booked if stage in stages and route not in link]
        if not any(other.when & when for other in others):
            yield machine, stages, kind


def _maker(program: Program, route: Route) -> str | None:
    """The stage that records the sending; None for the client."""
    return next((stage.name for stage in program.producers[route.tensor.name] if stage.machine == route.source), None)


def _taker(program: Program, route: Route) -> str | None:
    """The stage that records the receiving: the first on its machine that takes the tensor; None for the client."""
    stages = program.stages_on(route.destination)
    return next((stage.name for stage in stages if route.tensor in stage.inputs), None)
