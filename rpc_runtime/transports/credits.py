"""Flow control of a link's two ends, without locks, frames or clocks: what is sent next, and which credits are due.

Each tensor of a link has its own queue and window, so a tensor that waits never blocks another one. Among the tensors
that may be sent, the oldest micro-batch goes first, because the receiver waits for it.

A window is how many micro-batches of a tensor may be in flight. Between nearby machines the planned depth is enough. On
a link of high latency it is not: a credit returns one round trip plus the receiver's computing time after its
micro-batch left. A window of w lets at most w micro-batches pass in that time. The link is not the bottleneck if w is
at least that time divided by the time between two micro-batches.

Neither time is known in advance, so the window adapts. The sender marks each micro-batch that had to wait for a credit.
Such a micro-batch widens the window by a half if, when it arrives, the receiver has none of this tensor left, or is
idle for lack of another input (which may take a slower path). Both ends then waited for a wider window. The window
ends at most a half above the need. If computing is the bottleneck, the receiver never runs out; if another link is, the
sender does not wait for credits of this link.

If bandwidth is the bottleneck, a wider window only fills buffers, and credits return ever later. So the sender stops
asking once credits take much longer than the quickest one did, as in TCP Vegas (Brakmo and Peterson, 1995).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rpc_runtime.program.routes import Route

OUTBOX = 2
"""Capacity of a tensor's queue at the sender: one micro-batch being sent, and the next one."""
MOST_MORE = 256
"""The most micro-batches by which a window is widened."""
MOST_MORE_BYTES = 16 * 1024 * 1024
"""The most memory of the receiver that these additional micro-batches may take."""
WIDENED_BY = 2
"""A window grows by its depth divided by this: few round trips to adapt, and little overshoot."""
MUCH_LONGER = 2
"""A credit that takes this many times as long as the quickest one has waited in buffers."""


def most_more(size_bytes: int) -> int:
    """Return the most micro-batches by which the window of a tensor of this size may be widened."""
    return min(MOST_MORE, MOST_MORE_BYTES // max(size_bytes, 1))


@dataclass
class ReceiveWindow:
    """The receiver's side of a window: ``depth`` micro-batches may be in flight, at most ``largest`` after widening.

    ``announced`` is the total number that the sender knows it may send.
    """

    depth: int
    largest: int
    arrived: int = 0
    consumed: int = 0
    announced: int = field(init=False)
    _rests_until: int = 0

    def __post_init__(self) -> None:
        self.announced = self.depth

    @property
    def may_arrive(self) -> bool:
        """Whether the sender has a credit for one more micro-batch."""
        return self.arrived < self.announced

    def arrive(self, waited: bool, starves: bool) -> bool:
        """Count an arrived micro-batch; return whether this widens the window, so that the sender must be notified.

        ``waited``: the sender had to wait for the credit. ``starves``: the receiver was idle for lack of an input.
        After widening, the window stays as it is until all micro-batches sent under the old one have arrived.
        """
        lacked = starves or self.arrived == self.consumed
        self.arrived += 1
        if not (waited and lacked and self.may_widen and self.arrived > self._rests_until):
            return False
        self._rests_until = self.arrived + self.depth
        self.depth = min(self.largest, self.depth + max(1, self.depth // WIDENED_BY))
        return True

    @property
    def may_widen(self) -> bool:
        return self.depth < self.largest

    @property
    def granted(self) -> int:
        """The total number of micro-batches that the sender may send."""
        return self.consumed + self.depth

    @property
    def is_due(self) -> bool:
        """Whether to send credits now: at once if the sender may be waiting for one, else two at a time."""
        behind = self.granted - self.announced
        return behind > 1 or (behind == 1 and self.announced - self.arrived <= self.depth // 2)

    def announce(self) -> tuple[int, int]:
        """Return the credit to send now, as (micro-batches consumed, micro-batches that may be in flight)."""
        self.announced = self.granted
        return self.consumed, self.depth


@dataclass
class SendWindow:
    """The sender's side of a window. Times are in nanoseconds of one clock."""

    depth: int
    largest: int
    started: int = 0
    credited: int = 0
    _waits: bool = False
    _starts: deque[int] = field(default_factory=deque)
    _last_nanoseconds: int = 0
    _least_nanoseconds: int | None = None

    @property
    def may_start(self) -> bool:
        return self.started - self.credited < self.depth

    def wait(self) -> None:
        """Record that a micro-batch is queued without a credit for it."""
        self._waits = True

    def start(self, now: int) -> bool:
        """Count a micro-batch that starts; return whether it waited for a credit and a wider window would help."""
        self.started += 1
        self._starts.append(now)
        waited, self._waits = self._waits, False
        quickest = self._least_nanoseconds
        return waited and (quickest is None or self._last_nanoseconds <= MUCH_LONGER * quickest)

    def is_possible(self, consumed: int, depth: int) -> bool:
        """Return whether a receiver that follows the protocol could send this credit."""
        return self.credited <= consumed <= self.started and self.depth <= depth <= self.largest

    def credit(self, consumed: int, depth: int, now: int) -> None:
        """Apply a credit: ``consumed`` micro-batches in total, and ``depth`` that may be in flight."""
        for _ in range(consumed - self.credited):
            self._last_nanoseconds = now - self._starts.popleft()
            least = self._least_nanoseconds
            self._least_nanoseconds = self._last_nanoseconds if least is None else min(least, self._last_nanoseconds)
        self.credited, self.depth = consumed, depth


def depths(route: Route) -> tuple[int, int]:
    """Return the initial and the largest limit of a route's micro-batches in flight."""
    return route.depth, route.depth + most_more(route.tensor.size_bytes)


@dataclass
class SendQueue:
    """Micro-batches of one tensor: those queued, as (sequence number, value), and the numbers of those being sent."""

    route: Route
    window: SendWindow
    items: deque[tuple[int, Any]] = field(default_factory=deque)
    sending: deque[int] = field(default_factory=deque)


class SendItem(NamedTuple):
    """A micro-batch to send. ``waited`` tells the receiver that it had to wait for a credit."""

    tensor_index: int
    sequence: int
    value: Any
    waited: bool


class Outbox:
    """The sending end: the queue and window of each tensor. Times are in nanoseconds of one clock."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_name = {route.tensor.name: SendQueue(route, SendWindow(*depths(route))) for route in routes}
        self._by_index = {queue.route.index: queue for queue in self._by_name.values()}
        self.queued: dict[int, SendQueue] = {}
        """The tensors of which a micro-batch is queued, by index."""

    def window(self, tensor_index: int) -> SendWindow:
        return self._by_index[tensor_index].window

    def has_room(self, tensor: str) -> bool:
        """Return whether the queue of a tensor has room for one more micro-batch."""
        queue = self._by_name[tensor]
        return len(queue.items) + len(queue.sending) < OUTBOX

    def put(self, tensor: str, sequence: int, value: Any) -> None:
        queue = self._by_name[tensor]
        queue.items.append((sequence, value))
        self.queued[queue.route.index] = queue

    def next(self, now: int) -> SendItem | None:
        """Return the micro-batch to send now, or None; it takes room until `sent`. Mark tensors that lack a credit."""
        chosen: SendQueue | None = None
        for queue in self.queued.values():
            if not queue.window.may_start:
                queue.window.wait()
            elif chosen is None or queue.items[0][0] < chosen.items[0][0]:
                chosen = queue
        if chosen is None:
            return None
        sequence, value = chosen.items.popleft()
        chosen.sending.append(sequence)
        if not chosen.items:
            del self.queued[chosen.route.index]
        return SendItem(chosen.route.index, sequence, value, chosen.window.start(now))

    def sent(self, tensor_index: int) -> None:
        """Give back the room of the tensor's oldest micro-batch, which was sent."""
        self._by_index[tensor_index].sending.popleft()

    def clear(self) -> None:
        for queue in self._by_name.values():
            queue.items.clear()
        self.queued.clear()


class Grants:
    """The receiving end: the window of each tensor, and the credits that were not sent yet."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._windows = {route.index: ReceiveWindow(*depths(route)) for route in routes}
        self._changed: dict[int, ReceiveWindow] = {}

    def window(self, tensor_index: int) -> ReceiveWindow:
        return self._windows[tensor_index]

    def arrive(self, tensor_index: int, waited: bool, starves: bool) -> bool:
        """Count an arrived micro-batch; return whether that widened the window, so that a credit may be due."""
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
        for tensor_index, window in [item for item in self._changed.items() if item[1].is_due]:
            del self._changed[tensor_index]
            yield (tensor_index, *window.announce())
