"""How many micro-batches of one tensor may be under way on a link, and when these should be more.

Between machines that are near each other the planned depth is enough. Over a link of high latency it is not: a credit
comes back a round trip after its micro-batch has left, and what the receiver computes of it, so with a window of w no
more than w pass in that time. To hold up nobody a window has to be that time by the time between two micro-batches.

Both of these are known to nobody, so it is found: a sender says of each micro-batch whether it had to wait for its
credit. If it had, and the receiver has nothing of this tensor when the whole of it has come, or stands still for want
of another input, as behind a way that is longer than this one, then both were idle for want of a wider window, and it
is widened by a half. So it ends within half of what is needed. Where computing limits, the receiver lacks nothing;
where another link does, the sender waits for no credit of this one.

Where the wire is what limits, a wider window would only fill its buffers, and credits would come back later and later.
So a sender asks for no more once credits take much longer than the quickest one did, as TCP Vegas does (Brakmo and
Peterson, 1995).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST_MORE = 256
"""Micro-batches by which a window is widened at most,"""
MOST_MORE_BYTES = 16 * 1024 * 1024
"""and what these may take of the receiver's memory."""
WIDENED_BY = 2
"""A window is widened by this part of itself, so that it is found in a few round trips, and not far exceeded."""
MUCH_LONGER = 2
"""Credits that take so many times as long as the quickest have waited in buffers on the way."""


def most_more(size_bytes: int) -> int:
    """By how many micro-batches of a tensor of this size its window may be widened."""
    return min(MOST_MORE, MOST_MORE_BYTES // max(size_bytes, 1))


@dataclass
class ReceiveWindow:
    """The receiver's side: ``depth`` micro-batches may be under way, ``largest`` if there is need.

    ``announced`` is what the sender knows: so many in all it may send.
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
        """Whether the sender had a credit for one more."""
        return self.arrived < self.announced

    def arrive(self, waited: bool, starves: bool) -> bool:
        """One more has come; whether that widens the window, so that the sender should hear of it.

        ``waited``: its sender had it before it had the credit. ``starves``: who takes it could do nothing until now for
        want of some input. A window that was widened rests until all have come that were sent without that.
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
        """How many in all the sender may send."""
        return self.consumed + self.depth

    @property
    def is_due(self) -> bool:
        """Whether the sender should hear of it: at once where it may wait for that, else every second time."""
        behind = self.granted - self.announced
        return behind > 1 or (behind == 1 and self.announced - self.arrived <= self.depth // 2)

    def announce(self) -> tuple[int, int]:
        """How many were consumed, and how many may be under way: what the sender is told now."""
        self.announced = self.granted
        return self.consumed, self.depth


@dataclass
class SendWindow:
    """The sender's side. Moments are in nanoseconds, of one clock."""

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
        """There is a micro-batch, and no credit for it."""
        self._waits = True

    def start(self, now: int) -> bool:
        """Counts one; whether it had to wait for its credit, and a wider window would help."""
        self.started += 1
        self._starts.append(now)
        waited, self._waits = self._waits, False
        quickest = self._least_nanoseconds
        return waited and (quickest is None or self._last_nanoseconds <= MUCH_LONGER * quickest)

    def is_possible(self, consumed: int, depth: int) -> bool:
        """Whether a receiver that keeps to the rules could say so."""
        return self.credited <= consumed <= self.started and self.depth <= depth <= self.largest

    def credit(self, consumed: int, depth: int, now: int) -> None:
        """So many were consumed, so many may be under way."""
        for _ in range(consumed - self.credited):
            self._last_nanoseconds = now - self._starts.popleft()
            least = self._least_nanoseconds
            self._least_nanoseconds = self._last_nanoseconds if least is None else min(least, self._last_nanoseconds)
        self.credited, self.depth = consumed, depth
