"""Windows of a sender and a receiver, joined by a link that takes time and passes so many bytes at once."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, strategies as st

from tvm_split.rpc_runtime.transports.credit_window import (
    MOST_MORE,
    MOST_MORE_BYTES,
    ReceiveWindow,
    SendWindow,
    most_more,
)


class FarLink:
    """Steps of one unit of time: a micro-batch is ready at the sender in each, and may be computed in each.

    ``delay`` is the latency of either way, ``wire`` how long a micro-batch takes to pass behind the one before.
    """

    def __init__(self, depth: int, largest: int, delay: int, wire: int = 0) -> None:
        self.sender = SendWindow(depth, largest)
        self.receiver = ReceiveWindow(depth, largest)
        self._delay, self._wire = delay, wire
        self._there: deque[tuple[int, bool]] = deque()
        self._back: deque[tuple[int, tuple[int, int]]] = deque()
        self._now = self._free = 0

    def step(self, compute_every: int = 1) -> None:
        self._now += 1
        now = self._now
        while self._back and self._back[0][0] <= now:
            _, credit = self._back.popleft()
            assert self.sender.is_possible(*credit)
            self.sender.credit(*credit, now)
        if self.sender.may_start:
            self._free = max(self._free, now) + self._wire
            self._there.append((self._free + self._delay, self.sender.start(now)))
        else:
            self.sender.wait()
        while self._there and self._there[0][0] <= now:
            _, waited = self._there.popleft()
            assert self.receiver.may_arrive
            self.receiver.begin(waited)
            self.receiver.arrived += 1
        if self.receiver.arrived > self.receiver.consumed and now % compute_every == 0:
            self.receiver.consumed += 1
        if self.receiver.granted > self.receiver.announced:
            self._back.append((now + self._delay, self.receiver.announce()))

    def rate(self, steps: int) -> float:
        before = self.receiver.consumed
        for _ in range(steps):
            self.step()
        return (self.receiver.consumed - before) / steps


@given(st.integers(1, 4), st.integers(0, 25))
def test_a_far_link_is_used_in_full_after_a_while(depth: int, delay: int) -> None:
    link = FarLink(depth, depth + MOST_MORE, delay)
    link.rate(6000)
    assert link.rate(500) > 0.95
    assert link.receiver.depth <= max(depth, 2 * delay + 3)


@given(st.integers(1, 4), st.integers(4, 25))
def test_without_growing_a_window_passes_once_per_round_trip(depth: int, delay: int) -> None:
    assert FarLink(depth, depth, delay).rate(2000) <= depth / (2 * delay) + 0.01


@given(st.integers(3, 6), st.integers(0, 3))
def test_a_receiver_that_is_slow_gets_no_wider_window(compute_every: int, delay: int) -> None:
    link = FarLink(3, 3 + MOST_MORE, delay)
    for _ in range(3000):
        link.step(compute_every)
    assert link.receiver.depth <= 3 + delay


@given(st.integers(5, 20), st.integers(0, 60))
def test_a_wire_that_is_slow_is_filled_and_its_buffers_are_not(wire: int, delay: int) -> None:
    link = FarLink(3, 3 + MOST_MORE, delay, wire)
    link.rate(8000)
    assert link.rate(2000) > 0.9 / wire
    there_and_back = 2 * delay + wire
    assert link.receiver.depth <= 3 * there_and_back / wire + 3


@pytest.mark.parametrize(
    ("size_bytes", "more"), [(0, MOST_MORE), (1000, MOST_MORE), (MOST_MORE_BYTES // 3, 3), (MOST_MORE_BYTES + 1, 0)]
)
def test_large_tensors_get_few_more(size_bytes: int, more: int) -> None:
    assert most_more(size_bytes) == more
