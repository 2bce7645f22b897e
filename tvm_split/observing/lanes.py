"""The lanes of one machine's events, as viewers draw them: events of one lane do not overlap."""

from collections.abc import Iterable, Mapping, Sequence

from rpc_runtime.program.events import BLOCK, COMPUTE, KERNEL, RECEIVE, SEND, WAIT, TraceEvent

COMPUTING = "compute"


def lane_of(event: TraceEvent) -> str:
    """Return the name of an event's lane: the computing thread, or receiving or sending a tensor over a link."""
    if event.kind in (COMPUTE, WAIT, BLOCK):
        return COMPUTING
    ways = {RECEIVE: f"receive {event.tensor} from {event.peer}", SEND: f"send {event.tensor} to {event.peer}"}
    return ways.get(event.kind, event.kind)


def title_of(event: TraceEvent, layers: Mapping[tuple[str, str, str], Sequence[str]]) -> str:
    """Return the title of an event with a detail: the layers of a kernel, by `About.layers_of_kernels`, if known."""
    calls = layers.get((event.machine, event.stage, event.detail), ()) if event.kind == KERNEL else ()
    return (calls[event.value] if event.value < len(calls) else "") or event.detail


def in_lanes(events: Iterable[TraceEvent]) -> dict[str, list[TraceEvent]]:
    """Return the events of one machine by lane, in the order of their start.

    Events that overlap, such as the flights of several micro-batches, get lanes of their own with a number.
    """
    lanes: dict[str, list[TraceEvent]] = {}
    for event in sorted(events, key=lambda event: (event.start_nanoseconds, event.end_nanoseconds)):
        name = lane = lane_of(event)
        number = 1
        while (before := lanes.get(lane)) and before[-1].end_nanoseconds > event.start_nanoseconds:
            number += 1
            lane = f"{name} {number}"
        lanes.setdefault(lane, []).append(event)
    return lanes
