"""The lanes of one machine's events, as viewers draw them: events of one lane do not overlap."""

from collections.abc import Iterable

from rpc_runtime.program.events import BLOCK, COMPUTE, RECEIVE, SEND, WAIT, TraceEvent


def lane_of(event: TraceEvent) -> str:
    """Return the name of an event's lane: of the computing thread, or of a tensor's way over a link."""
    if event.kind in (COMPUTE, WAIT, BLOCK):
        return "compute"
    ways = {RECEIVE: f"receive {event.tensor} from {event.peer}", SEND: f"send {event.tensor} to {event.peer}"}
    return ways.get(event.kind, event.kind)


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
