"""Windows of a sender and a receiver, joined by a link that takes time and passes so many bytes at once."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.transports.credit_window import (
    MOST_MORE,
    MOST_MORE_BYTES,
    WIDENED_BY,
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
            self.receiver.arrive(waited, starves=False)
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
    assert link.receiver.depth <= max(depth, (2 * delay + 3) * (1 + 1 / WIDENED_BY))


@given(st.integers(1, 4), st.integers(4, 25))
def test_without_growing_a_window_passes_once_per_round_trip(depth: int, delay: int) -> None:
    assert FarLink(depth, depth, delay).rate(2000) <= depth / (2 * delay) + 0.01


@given(st.integers(3, 6), st.integers(0, 3))
def test_a_receiver_that_is_slow_gets_no_wider_window(compute_every: int, delay: int) -> None:
    link = FarLink(3, 3 + MOST_MORE, delay)
    for _ in range(3000):
        link.step(compute_every)
    assert link.receiver.depth <= (3 + delay) * (1 + 1 / WIDENED_BY)


@given(st.integers(5, 20), st.integers(0, 60))
def test_a_wire_that_is_slow_is_filled_and_its_buffers_are_not(wire: int, delay: int) -> None:
    link = FarLink(3, 3 + MOST_MORE, delay, wire)
    link.rate(8000)
    assert link.rate(2000) > 0.9 / wire
    there_and_back = 2 * delay + wire
    assert link.receiver.depth <= (3 * there_and_back / wire + 3) * (1 + 1 / WIDENED_BY)


def test_what_is_needed_is_found_in_two_round_trips_for_each_half_more() -> None:
    delay = 50
    link = FarLink(3, 3 + MOST_MORE, delay)
    for _ in range(2 * 2 * delay * len([3, 4, 6, 9, 13, 19, 28, 42, 63, 94, 141])):
        link.step()
    assert link.receiver.depth == 141


def test_what_waited_widens_only_if_it_was_lacked() -> None:
    window = ReceiveWindow(2, 4)
    assert not window.arrive(waited=False, starves=True)
    assert not window.arrive(waited=True, starves=False)  # one more waits here
    window.consumed += 2
    assert window.arrive(waited=True, starves=False)  # nothing was here
    window.consumed += 1
    assert not window.arrive(waited=True, starves=True)  # it rests
    window.consumed += 1
    window.arrive(waited=False, starves=False)
    assert window.arrive(waited=True, starves=True)  # it was here, and what it waits for lacked room
    assert (window.depth, window.may_widen) == (4, False)
    window.consumed += 2
    assert not window.arrive(waited=True, starves=True)


MOVE = st.sampled_from(["start", "arrive", "consume", "tell", "hear"])
MOVES = st.lists(st.tuples(MOVE, st.booleans()), max_size=200)


@given(st.integers(1, 5), st.integers(0, 20), MOVES)
def test_windows_stay_in_their_limits_and_no_credit_is_lost(
    depth: int, more: int, moves: list[tuple[str, bool]]
) -> None:
    """Whatever happens when: windows only widen, nobody has more under way than fits, and nobody waits for ever."""
    sender, receiver = SendWindow(depth, depth + more), ReceiveWindow(depth, depth + more)
    there: deque[bool] = deque()
    back: deque[tuple[int, int]] = deque()

    def move(what: str, flag: bool) -> None:
        before = receiver.depth
        if what == "start" and sender.may_start:
            there.append(sender.start(0))
        elif what == "start":
            sender.wait()
        elif what == "arrive" and there:
            assert receiver.may_arrive
            lacked = flag or receiver.arrived == receiver.consumed
            waited = there.popleft()
            assert receiver.arrive(waited, flag) is (receiver.depth > before)
            assert receiver.depth == before or (waited and lacked)
        elif what == "consume" and receiver.consumed < receiver.arrived:
            receiver.consumed += 1
        elif what == "tell" and receiver.is_due:
            back.append(receiver.announce())
        elif what == "hear" and back:
            assert sender.is_possible(*back[0])
            sender.credit(*back.popleft(), 0)
        assert before <= receiver.depth <= depth + more
        assert sender.started - receiver.consumed <= receiver.depth
        assert sender.depth <= receiver.depth

    for what, flag in moves:
        move(what, flag)
    while there or back or receiver.is_due or receiver.consumed < receiver.arrived:
        for what in ("arrive", "consume", "tell", "hear"):
            move(what, False)
    assert sender.may_start


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_who_lacks_more_has_no_narrower_window(depth: int, arrivals: list[tuple[bool, bool]]) -> None:
    """A receiver for which all waited, and who lacked all, beside one of whose arrivals some did."""
    some, all_of_them = ReceiveWindow(depth, depth + MOST_MORE), ReceiveWindow(depth, depth + MOST_MORE)
    for waited, starves in arrivals:
        some.arrive(waited, starves)
        all_of_them.arrive(waited=True, starves=True)
        assert some.depth <= all_of_them.depth


@pytest.mark.parametrize(
    ("size_bytes", "more"), [(0, MOST_MORE), (1000, MOST_MORE), (MOST_MORE_BYTES // 3, 3), (MOST_MORE_BYTES + 1, 0)]
)
def test_large_tensors_get_few_more(size_bytes: int, more: int) -> None:
    assert most_more(size_bytes) == more
