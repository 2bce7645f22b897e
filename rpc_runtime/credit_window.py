"""How many micro-batches of one tensor may be under way on a link, and when these should be more.

Between machines that are near each other the planned depth is enough. Over a link of high latency it is not: a credit
comes back a round trip after its micro-batch has left, so with a window of w no more than w pass per round trip. A
sender therefore says of each micro-batch whether it had to wait for its credit. If it had, and the receiver has nothing
of this tensor when it comes, then both sides were idle for want of a wider window, and it is widened by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_MORE = 64
"""Micro-batches by which a window is widened at most,"""
MOST_MORE_BYTES = 32 * 1024 * 1024
"""and what these may take of the receiver's memory."""


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

    def __post_init__(self) -> None:
        self.announced = self.depth

    @property
    def may_arrive(self) -> bool:
        """Whether the sender had a credit for one more."""
        return self.arrived < self.announced

    def begin(self, waited: bool) -> None:
        """One more begins to arrive; ``waited``: its sender had it before it had the credit."""
        if waited and self.arrived == self.consumed and self.depth < self.largest:
            self.depth += 1

    @property
    def granted(self) -> int:
        """How many in all the sender may send."""
        return self.consumed + self.depth


@dataclass
class SendWindow:
    """The sender's side: ``granted`` in all may be ``started``."""

    granted: int
    most_ahead: int
    started: int = 0
    waits: bool = False

    @property
    def may_start(self) -> bool:
        return self.started < self.granted

    def start(self) -> bool:
        """Counts one; whether it had to wait for its credit."""
        self.started += 1
        waited, self.waits = self.waits, False
        return waited

    def is_possible(self, granted: int) -> bool:
        """Whether a receiver that keeps to the rules could grant so many."""
        return self.granted <= granted <= self.started + self.most_ahead
