"""Compare prediction and measurement for every machine and link of a deployment, and for the whole.

Pure functions: from a plan, a program, its trace and the times of its results to values, and from these to advice. A
report of ``tvm-split bench --json`` is read as far as replanning and simulation need it.
"""

import bisect
import functools
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from rpc_runtime.program.codecs import NONE
from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program.program import Program
from rpc_runtime.program.round_robin import Recurrence
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.transports.transport import uses_codecs
from tvm_split.deployment.report_values import (
    Comparison,
    LinkReport,
    MachineReport,
    advice_for,
    changed_links,
    limit_of,
)
from tvm_split.deployment.run_times import MeasuredRuns, Window
from tvm_split.errors import PlanError
from tvm_split.placement.corrections import Measured
from tvm_split.placement.plan import Plan
from tvm_split.placement.prediction import LinkPrediction, MachinePrediction
from tvm_split.placement.problem import CoresLoad
from tvm_split.placement.profile import Corrections
from tvm_split.units import Shown
from tvm_split.values import adapter_of, read

CLOCK_ERROR = 5_000_000
"""Largest apparent difference between the clocks of two machines, in nanoseconds: half a round trip of a slow link."""


@dataclass(frozen=True, repr=False)
class DeploymentReport(Shown):
    """Predictions and measurements of a deployment, per micro-batch.

    ``period`` is the time between two results of a stream once the pipeline is full (throughput is its inverse),
    ``latency`` is the time of a single run. ``runs`` and ``streamed`` count the single runs and the results of streams
    that were measured. ``limiting`` is the predicted bottleneck, which sets the period; empty without a prediction.
    ``measured_limiting`` is the measured one; empty without a stream.
    ``moved`` says since when the stages are elsewhere than planned: only what came later counts, and no prediction.
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
    measured_limiting: str = ""
    moved: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The report as values for JSON; each comparison also has its ratio, measured by predicted."""
        values: dict[str, Any] = adapter_of(DeploymentReport).dump_python(self, mode="json", by_alias=True)
        return values


def report_of(
    plan: Plan,
    program: Program,
    trace: Iterable[TraceEvent],
    measured: MeasuredRuns,
    carried: Mapping[tuple[str, str], str] = MappingProxyType({}),
    moved: str = "",
) -> DeploymentReport:
    """Compare the prediction of ``plan`` with ``trace`` and ``measured``; ``carried`` has the transport of each link.

    There is no prediction for stages that were ``moved``.

    Machines and links are measured in the steady part of streams, where every machine is busy, and compared with the
    prediction for streams. Without streams, single runs are compared with the prediction for one input alone.
    """
    prediction = None if moved else plan.prediction
    times = _Times(_begun_in(measured.streams or _around(measured.runs), trace))
    predicted_links = {(link.source, link.destination): link for link in prediction.links} if prediction else {}
    links = tuple(
        _link_report(program, ends, times, predicted_links.get(ends), carried.get(ends, ""))
        for ends in dict.fromkeys((route.source, route.destination) for route in program.routes)
    )
    predicted_machines = {machine.machine: machine for machine in prediction.machines} if prediction else {}
    shared = prediction.shared_cores if prediction else ()
    machines = tuple(
        _machine_report(
            program.stages_on(name), name, times, predicted_machines.get(name), links, shared, bool(measured.streams)
        )
        for name in program.machines
    )
    period = Comparison(prediction.period_seconds if prediction else None, measured.period_seconds)
    latency = Comparison(prediction.latency_seconds if prediction else None, measured.latency_seconds)
    estimated = {machine.machine: machine.estimated_share for machine in predicted_machines.values()}
    return DeploymentReport(
        model=plan.model,
        origin=plan.origin,
        limiting=prediction.limiting if prediction else "",
        period=period,
        latency=latency,
        machines=machines,
        links=links,
        runs=len(measured.runs),
        streamed=measured.streamed,
        advice=advice_for(period, latency, machines, links, estimated) if prediction else (),
        profiled_at=prediction.profiled_at if prediction else None,
        corrections=prediction.corrections if prediction else Corrections(),
        measured_limiting=limit_of(period, machines, links),
        moved=moved,
    )


def _around(runs: Sequence[Window]) -> tuple[Window, ...]:
    """Return one window around all runs: other machines' clocks are too inexact for the window of a single run."""
    if not runs:
        return ()
    start, end = min(run.start for run in runs), max(run.end for run in runs)
    return (Window(start - CLOCK_ERROR, end + CLOCK_ERROR, len(runs)),)


def _begun_in(windows: Sequence[Window], events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the events that begin in one of the windows, which do not overlap.

    The end does not matter, because it may be after the arrival of the result: a send event ends only when the next
    frame is requested.
    """
    ordered = sorted(windows, key=lambda window: window.start)
    starts = [window.start for window in ordered]
    for event in events:
        position = bisect.bisect_right(starts, event.start_nanoseconds) - 1
        if position >= 0 and event.start_nanoseconds <= ordered[position].end:
            yield event


_Sums = defaultdict[tuple[str, str, str], dict[int, float]]
"""Sums of trace events by machine, stage or peer, and kind, then by micro-batch."""


class _Times:
    """Seconds of trace events by stage, and seconds and bytes by the peer of their link."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        sums: list[_Sums] = [defaultdict(lambda: defaultdict(float)) for _ in range(3)]
        self.of_stages, self.of_links, self.bytes = sums
        for event in events:
            seconds = (event.end_nanoseconds - event.start_nanoseconds) * 1e-9
            self.of_stages[event.machine, event.stage, event.kind][event.sequence] += seconds
            self.of_links[event.machine, event.peer, event.kind][event.sequence] += seconds
            self.bytes[event.machine, event.peer, event.kind][event.sequence] += event.size_bytes

    def of_machine(self, stages: Iterable[StageSpec], kind: str) -> float | None:
        """Seconds of a machine's stages per micro-batch of the stream; None if there are no events.

        Stages with the same round-robin schedule are summed before the median: a median over micro-batches that only
        some of the stages compute would be meaningless.
        """
        groups: dict[Recurrence, list[StageSpec]] = defaultdict(list)
        for stage in stages:
            groups[stage.micro_batches].append(stage)
        medians = [
            _median([self.of_stages[stage.machine, stage.name, kind] for stage in members], schedule)
            for schedule, members in groups.items()
        ]
        measured = [seconds for seconds in medians if seconds is not None]
        return sum(measured) if measured else None


def _median(parts: Iterable[Mapping[int, float]], schedule: Recurrence) -> float | None:
    """Return the median over the schedule's micro-batches of the summed parts, times the schedule's share.

    This is the average cost per micro-batch of the whole stream; None without events.
    """
    summed: dict[int, float] = defaultdict(float)
    for part in parts:
        for sequence, value in part.items():
            if sequence in schedule:
                summed[sequence] += value
    return statistics.median(summed.values()) * schedule.share if summed else None


def _machine_report(
    stages: Sequence[StageSpec],
    machine: str,
    times: _Times,
    predicted: MachinePrediction | None,
    links: Sequence[LinkReport],
    shared_cores: Sequence[CoresLoad],
    contended: bool,
) -> MachineReport:
    names = tuple(stage.name for stage in stages)
    predicted_seconds = least = None
    if predicted is not None:
        # If cores are oversubscribed, the measurement includes waiting for a core while others compute.
        oversubscription = max(
            [1.0, *(shared.oversubscription for shared in shared_cores if machine in shared.machines)]
        )
        predicted_seconds = predicted.compute_seconds * oversubscription if contended else predicted.alone_seconds
        if contended and (predicted.transfer_seconds or oversubscription > 1):
            least = predicted.compute_seconds - predicted.transfer_seconds
    received = sum(link.seconds.spread for link in links if link.destination == machine)
    sent = sum(link.seconds.spread for link in links if link.source == machine)
    return MachineReport(
        machine=machine,
        stages=names,
        shares=tuple(stage.micro_batches.share for stage in stages),
        micro_batches=min((len(times.of_stages[machine, name, COMPUTE]) for name in names), default=0),
        compute=Comparison(predicted_seconds, times.of_machine(stages, COMPUTE), least),
        receive=_range(predicted.receive_seconds if predicted else None, times.of_machine(stages, RECEIVE), received),
        send=_range(predicted.send_seconds if predicted else None, times.of_machine(stages, SEND), sent),
    )


def _range(least: float | None, measured: float | None, spread: float) -> Comparison:
    """Return the comparison of wire times with a range from ``least`` (bytes / bandwidth) to ``least + spread``.

    The upper end is a single transfer with its latency. In a stream latencies overlap, unless the ends are busy with
    other work.
    """
    if least is None or not spread:
        return Comparison(least, measured)
    return Comparison(least + spread, measured, least)


def _link_report(
    program: Program, ends: tuple[str, str], times: _Times, predicted: LinkPrediction | None, transport: str
) -> LinkReport:
    routes = [route for route in program.routes if (route.source, route.destination) == ends]
    schedule = functools.reduce(operator.or_, (route.when for route in routes))
    source, destination = ends
    both_ends = (source, destination, SEND), (destination, source, RECEIVE)
    seconds, sent_bytes = (
        [median for end in both_ends if (median := _median([sums[end]], schedule)) is not None]
        for sums in (times.of_links, times.bytes)
    )
    codecs = tuple(dict.fromkeys(route.codec for route in routes if route.codec != NONE))
    least, spread = None, 0.0
    if predicted is not None:
        least = predicted.stream_seconds
        spread = max(0.0, predicted.seconds * schedule.share - predicted.stream_seconds)
    return LinkReport(
        *ends,
        Comparison(predicted.bytes if predicted else None, max(sent_bytes, default=None)),
        _range(least, max(seconds, default=None), spread),  # the slower end counts
        transport,
        codecs if uses_codecs(transport) else (),
    )


def read_computing(path: Path, model: str) -> dict[str, float]:
    """Measured seconds of computing by machine, per micro-batch of a stream; raises a `PlanError` for a wrong file."""
    report = _read_report(path, model)
    return {
        machine.machine: machine.compute.measured for machine in report.machines if machine.compute.measured is not None
    }


def read_measured(path: Path, model: str) -> Measured:
    """Measurements of a model's plan: of machines that have a prediction, and of links that have changed.

    Raises:
        PlanError: the file cannot be read, is not a report, or is a report of another model or without a prediction.
    """
    report = _read_report(path, model)
    compared = {
        machine.machine: 1.0 if machine.compute.inconclusive else machine.compute.ratio for machine in report.machines
    }
    ratios = {machine: ratio for machine, ratio in compared.items() if ratio}
    if not ratios:
        raise PlanError(
            f"{path} has nothing to compare: the plan that was measured had no prediction; make one with "
            "`tvm-split plan`, of a split by hand with --predict"
        )
    return Measured(
        compute_ratios=ratios,
        link_speeds={
            (link.source, link.destination): link.bytes.measured / link.seconds.measured
            for link in changed_links(report.period, report.latency, report.links)
            if link.bytes.measured and link.seconds.measured
        },
        earlier=report.corrections,
        profiled_at=report.profiled_at,
    )


def _read_report(path: Path, model: str) -> DeploymentReport:
    try:
        report = read(DeploymentReport, path, PlanError)
    except PlanError as error:
        raise PlanError(f"{path} is not a report of `tvm-split bench --json`: {error}") from error
    if report.model != model:
        raise PlanError(f"{path} is of model {report.model!r}, the model is {model!r}")
    if report.moved:
        raise PlanError(f"{path} says nothing about its plan ({report.moved}): measure a deployment that stays")
    return report
