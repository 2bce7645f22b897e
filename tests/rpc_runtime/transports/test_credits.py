"""Flow control of a link's two ends: queues alone, and windows joined by a simulated link with latency."""

from collections import deque

from hypothesis import given, settings, strategies as st

from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.credits import MOST_MORE, WIDENED_BY, Outbox, ReceiveWindow, SendItem, SendWindow


def route(index: int, depth: int = 3) -> Route:
    return Route(index, TensorSpec(f"t{index}", (4,), "uint8"), "a", "b", depth)


def test_the_oldest_micro_batch_that_may_go_leaves_first() -> None:
    outbox = Outbox([route(0), route(1)])
    outbox.put("t0", 5, "five")
    outbox.put("t1", 4, "four")
    assert outbox.next(0) == SendItem(1, 4, "four", False)
    outbox.sent(1)
    assert outbox.next(0) == SendItem(0, 5, "five", False)
    outbox.sent(0)
    assert outbox.next(0) is None


class FarLink:
    """A simulated link, in steps of one time unit.

    In each step, the sender has a micro-batch, and the receiver may compute one. ``delay`` is the latency of each
    direction; ``wire`` is the time that a micro-batch needs behind the one before it.
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


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(0, 25))
def test_a_far_link_is_used_in_full_after_a_while(depth: int, delay: int) -> None:
    link = FarLink(depth, depth + MOST_MORE, delay)
    link.rate(6000)
    assert link.rate(500) > 0.95
    assert link.receiver.depth <= max(depth, (2 * delay + 3) * (1 + 1 / WIDENED_BY))


@settings(max_examples=25)
@given(st.integers(3, 6), st.integers(0, 3))
def test_a_receiver_that_is_slow_gets_no_wider_window(compute_every: int, delay: int) -> None:
    link = FarLink(3, 3 + MOST_MORE, delay)
    for _ in range(3000):
        link.step(compute_every)
    assert link.receiver.depth <= (3 + delay) * (1 + 1 / WIDENED_BY)


@settings(max_examples=25)
@given(st.integers(5, 20), st.integers(0, 60))
def test_a_wire_that_is_slow_is_filled_and_its_buffers_are_not(wire: int, delay: int) -> None:
    link = FarLink(3, 3 + MOST_MORE, delay, wire)
    link.rate(8000)
    assert link.rate(2000) > 0.9 / wire
    there_and_back = 2 * delay + wire
    assert link.receiver.depth <= (3 * there_and_back / wire + 3) * (1 + 1 / WIDENED_BY)


MOVE = st.sampled_from(["start", "arrive", "consume", "tell", "hear"])
MOVES = st.lists(st.tuples(MOVE, st.booleans()), max_size=200)


@given(st.integers(1, 5), st.integers(0, 20), MOVES)
def test_windows_stay_in_their_limits_and_no_credit_is_lost(
    depth: int, more: int, moves: list[tuple[str, bool]]
) -> None:
    """In any order of events, windows only widen, no more is in flight than fits, and nothing waits forever."""
    sender, receiver = SendWindow(depth, depth + more), ReceiveWindow(depth, depth + more)
    in_flight: deque[bool] = deque()
    announced: deque[tuple[int, int]] = deque()

    def move(what: str, flag: bool) -> None:
        before = receiver.depth
        if what == "start" and sender.may_start:
            in_flight.append(sender.start(0))
        elif what == "start":
            sender.wait()
        elif what == "arrive" and in_flight:
            assert receiver.may_arrive
            lacked = flag or receiver.arrived == receiver.consumed
            waited = in_flight.popleft()
            assert receiver.arrive(waited, flag) is (receiver.depth > before)
            assert receiver.depth == before or (waited and lacked)
        elif what == "consume" and receiver.consumed < receiver.arrived:
            receiver.consumed += 1
        elif what == "tell" and receiver.is_due:
            announced.append(receiver.announce())
        elif what == "hear" and announced:
            assert sender.is_possible(*announced[0])
            sender.credit(*announced.popleft(), 0)
        assert before <= receiver.depth <= depth + more
        assert sender.started - receiver.consumed <= receiver.depth
        assert sender.depth <= receiver.depth

    for what, flag in moves:
        move(what, flag)
    while in_flight or announced or receiver.is_due or receiver.consumed < receiver.arrived:
        for what in ("arrive", "consume", "tell", "hear"):
            move(what, False)
    assert sender.may_start
