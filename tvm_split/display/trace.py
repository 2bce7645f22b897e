"""Show a trace: what every machine and link did, and what limits."""

from collections.abc import Iterator

from rpc_runtime.program.events import HAPPENINGS, OPENED, TraceEvent
from rpc_runtime.program.routes import CLIENT
from tvm_split.display.view import Table, View, as_json, view
from tvm_split.observing.summary import TraceSummary, summary_of
from tvm_split.observing.trace import Trace
from tvm_split.units import bytes_text, count_text, seconds_text


@view.register
def view_of_trace(trace: Trace, *, details: bool = False) -> View:
    """Return the times of machines and links in a trace, and the sentence that says what limits."""
    summary = summary_of(trace)
    yield _machines(trace, summary)
    if summary.links:
        rows = [
            (f"{link.source} → {link.destination}", str(link.transfers), bytes_text(link.size_bytes),
             seconds_text(link.seconds), f"{link.share:.0%}")
            for link in summary.links
        ]  # fmt: skip
        yield Table("", ("link",), ("transfers", "bytes", "busy", "share"), rows)
    yield summary.limit
    for event, seconds in _moments(trace):
        yield f"{event.machine}, after {seconds_text(seconds)}: {event.detail}."
    yield from _doubts(trace)


def _machines(trace: Trace, summary: TraceSummary) -> Table:
    activities = ("compute", "wait", "block", "transfer")
    rows = [
        (
            machine.machine,
            str(machine.micro_batches),
            *(seconds_text(getattr(machine, f"{activity}_seconds")) for activity in activities),
            f"{machine.bubble:.0%}",
            f"{machine.overlap:.0%}",
        )
        for machine in summary.machines
    ]
    wall = max((machine.wall_seconds for machine in summary.machines), default=0.0)
    title = f"{trace.model}: {count_text(len(trace), 'event')}, {seconds_text(wall)} from first to last computing"
    caption = "bubble: share of the time without computing; overlap: share of transfers hidden by it"
    numbers = ("batches", *activities, "bubble", "overlap")
    return Table(title, ("machine",), numbers, rows, caption)


def _moments(trace: Trace) -> Iterator[tuple[TraceEvent, float]]:
    """Yield the events of the deployment itself after it opened, with the seconds since the trace's first event."""
    for event in trace.of_kind(*HAPPENINGS):
        if event.detail != OPENED:
            yield event, (event.start_nanoseconds - trace.begin) * 1e-9


def _doubts(trace: Trace) -> View:
    if trace.lost:
        yield f"{count_text(trace.lost, 'event')} lost: they were overwritten before they were read."
    errors = {name: trace.machines[name].clock_error_nanoseconds for name in trace.machines if name != CLIENT}
    worst = max(errors, key=lambda name: errors[name], default="")
    if worst and errors[worst]:
        yield f"Clocks are right to {seconds_text(errors[worst] * 1e-9)} ({worst})."


@as_json.register
def trace_as_json(trace: Trace) -> object:
    """Return the summary of a trace; its events are in the file that `Trace.save` writes."""
    clocks = {name: machine.clock_error_nanoseconds * 1e-9 for name, machine in trace.machines.items()}
    return {
        "model": trace.model,
        "events": len(trace),
        "lost_events": trace.lost,
        "clock_error_seconds": clocks,
        "happened": [
            {"machine": event.machine, "seconds": seconds, "detail": event.detail} for event, seconds in _moments(trace)
        ],
        **as_json(summary_of(trace)),
    }
