"""The rules of a link's two ends, without locks, frames and clocks: what leaves next, and who is told of which credits.

Each tensor of a link has its own queue and its own window (`credit_window`), so one that must wait never holds up
another. Of those that may go the oldest micro-batch goes first: what lags behind is what somebody waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rpc_runtime.program.routes import Route
from rpc_runtime.transports.credit_window import ReceiveWindow, SendWindow, most_more

OUTBOX = 2
"""Micro-batches of a tensor that wait at the sender: one on its way to the wire, one behind it."""


def depths(route: Route) -> tuple[int, int]:
    """How many micro-batches may be under way at first, and at most."""
    return route.depth, route.depth + most_more(route.tensor.size_bytes)


@dataclass
class Waiting:
    """Micro-batches of one tensor that are to leave, as (number, value)."""

    route: Route
    window: SendWindow
    queue: deque[tuple[int, Any]] = field(default_factory=deque)


class Departure(NamedTuple):
    """A micro-batch that leaves; ``waited``: the receiver should know that it had to, for a credit."""

    tensor_index: int
    sequence: int
    value: Any
    waited: bool


class Outbox:
    """The sending end: moments are in nanoseconds, of one clock."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_name = {route.tensor.name: Waiting(route, SendWindow(*depths(route))) for route in routes}
        self._by_index = {each.route.index: each for each in self._by_name.values()}
        self._queued: dict[int, Waiting] = {}

    def window(self, tensor_index: int) -> SendWindow:
        return self._by_index[tensor_index].window

    def has_room(self, tensor: str) -> bool:
        """Whether `put` has a place for one more micro-batch of a tensor."""
        return len(self._by_name[tensor].queue) < OUTBOX

    def put(self, tensor: str, sequence: int, value: Any) -> None:
        waiting = self._by_name[tensor]
        waiting.queue.append((sequence, value))
        self._queued[waiting.route.index] = waiting

    def next(self, now: int) -> Departure | None:
        """What leaves now, if anything may, and keeps its place until `left`. Notes who lacks a credit."""
        chosen: Waiting | None = None
        for waiting in self._queued.values():
            if not waiting.window.may_start:
                waiting.window.wait()
            elif chosen is None or waiting.queue[0][0] < chosen.queue[0][0]:
                chosen = waiting
        if chosen is None:
            return None
        sequence, value = chosen.queue[0]
        return Departure(chosen.route.index, sequence, value, chosen.window.start(now))

    def left(self, tensor_index: int) -> None:
        """The tensor's oldest micro-batch has gone."""
        waiting = self._by_index[tensor_index]
        waiting.queue.popleft()
        if not waiting.queue:
            del self._queued[tensor_index]

    def clear(self) -> None:
        for waiting in self._by_name.values():
            waiting.queue.clear()
        self._queued.clear()


class Grants:
    """The receiving end: how far each tensor was consumed, and what of that the sender does not know yet."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._windows = {route.index: ReceiveWindow(*depths(route)) for route in routes}
        self._changed: dict[int, ReceiveWindow] = {}

    def window(self, tensor_index: int) -> ReceiveWindow:
        return self._windows[tensor_index]

    def arrive(self, tensor_index: int, waited: bool, starves: bool) -> bool:
        """One more has come; whether the sender may have to hear of a wider window."""
        window = self._windows[tensor_index]
        if not window.arrive(waited, starves):
            return False
        self._changed[tensor_index] = window
        return True

    def consume(self, tensor_index: int) -> None:
        window = self._windows[tensor_index]
        window.consumed += 1
        self._changed[tensor_index] = window

    def due(self) -> Iterator[tuple[int, int, int]]:
        """What the sender is told now: tensor, micro-batches consumed, and how many may be under way."""
        for tensor_index, window in [each for each in self._changed.items() if each[1].is_due]:
            del self._changed[tensor_index]
            yield (tensor_index, *window.announce())
