"""Flow control of a link's two ends, without locks, frames or clocks: what is sent next, and which credits are due.

Each tensor of a link has its own queue and window (`credit_window`), so a tensor that waits never blocks another one.
Among the tensors that may be sent, the oldest micro-batch goes first, because the receiver waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rpc_runtime.program.routes import Route
from rpc_runtime.transports.credit_window import ReceiveWindow, SendWindow, most_more

OUTBOX = 2
"""Capacity of a tensor's queue at the sender: one micro-batch being sent, and the next one."""


def depths(route: Route) -> tuple[int, int]:
    """Return the initial and the largest number of micro-batches in flight."""
    return route.depth, route.depth + most_more(route.tensor.size_bytes)


@dataclass
class Waiting:
    """Queued micro-batches of one tensor, as (sequence number, value)."""

    route: Route
    window: SendWindow
    queue: deque[tuple[int, Any]] = field(default_factory=deque)


class Departure(NamedTuple):
    """A micro-batch to send. ``waited`` tells the receiver that it had to wait for a credit."""

    tensor_index: int
    sequence: int
    value: Any
    waited: bool


class Outbox:
    """The sending end. Times are in nanoseconds of one clock."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_name = {route.tensor.name: Waiting(route, SendWindow(*depths(route))) for route in routes}
        self._by_index = {each.route.index: each for each in self._by_name.values()}
        self._queued: dict[int, Waiting] = {}

    def window(self, tensor_index: int) -> SendWindow:
        return self._by_index[tensor_index].window

    def has_room(self, tensor: str) -> bool:
        """Return whether the queue of a tensor has room for one more micro-batch."""
        return len(self._by_name[tensor].queue) < OUTBOX

    def put(self, tensor: str, sequence: int, value: Any) -> None:
        waiting = self._by_name[tensor]
        waiting.queue.append((sequence, value))
        self._queued[waiting.route.index] = waiting

    def next(self, now: int) -> Departure | None:
        """Return the micro-batch to send now, or None; it stays queued until `left`. Note tensors without a credit."""
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
        """Remove the tensor's oldest micro-batch, which was sent."""
        waiting = self._by_index[tensor_index]
        waiting.queue.popleft()
        if not waiting.queue:
            del self._queued[tensor_index]

    def clear(self) -> None:
        for waiting in self._by_name.values():
            waiting.queue.clear()
        self._queued.clear()


class Grants:
    """The receiving end: the window of each tensor, and the credits that were not sent yet."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._windows = {route.index: ReceiveWindow(*depths(route)) for route in routes}
        self._changed: dict[int, ReceiveWindow] = {}

    def window(self, tensor_index: int) -> ReceiveWindow:
        return self._windows[tensor_index]

    def arrive(self, tensor_index: int, waited: bool, starves: bool) -> bool:
        """Count an arrived micro-batch; return whether the window was widened, which the sender may have to know."""
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
        """Yield the credits to send now, as (tensor index, micro-batches consumed, micro-batches allowed in flight)."""
        for tensor_index, window in [each for each in self._changed.items() if each[1].is_due]:
            del self._changed[tensor_index]
            yield (tensor_index, *window.announce())
