"""The rules of a link's two ends, by themselves."""

from __future__ import annotations

from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.transports.credits import OUTBOX, Departure, Grants, Outbox


def route(index: int, depth: int = 3) -> Route:
    return Route(index, TensorSpec(f"t{index}", (4,), "uint8"), "a", "b", depth)


def test_the_oldest_micro_batch_that_may_go_leaves_first() -> None:
    outbox = Outbox([route(0), route(1)])
    outbox.put("t0", 5, "five")
    outbox.put("t1", 4, "four")
    assert outbox.next(0) == Departure(1, 4, "four", False)
    outbox.left(1)
    assert outbox.next(0) == Departure(0, 5, "five", False)
    outbox.left(0)
    assert outbox.next(0) is None


def test_a_tensor_without_credit_holds_no_other_up_and_says_that_it_waited() -> None:
    outbox = Outbox([route(0, depth=1), route(1)])
    for sequence in (0, 1):
        outbox.put("t0", sequence, None)
    first = outbox.next(0)
    assert first is not None
    outbox.left(0)
    outbox.put("t1", 9, None)
    assert outbox.next(10) == Departure(1, 9, None, False)
    outbox.left(1)
    assert outbox.next(20) is None
    outbox.window(0).credit(1, 1, 30)
    assert outbox.next(40) == Departure(0, 1, None, True)


def test_there_is_room_for_what_leaves_and_one_behind_it() -> None:
    outbox = Outbox([route(0)])
    for sequence in range(OUTBOX):
        assert outbox.has_room("t0")
        outbox.put("t0", sequence, None)
    assert not outbox.has_room("t0")
    assert outbox.next(0) is not None
    assert not outbox.has_room("t0")  # until it has left
    outbox.left(0)
    assert outbox.has_room("t0")
    outbox.clear()
    assert outbox.next(0) is None


def test_a_sender_hears_of_each_tensor_that_was_consumed_once() -> None:
    grants = Grants([route(0), route(1)])
    for index in (0, 1):
        for _ in range(3):
            assert not grants.arrive(index, waited=False, starves=False)
    grants.consume(1)
    assert list(grants.due()) == [(1, 1, 3)]
    assert list(grants.due()) == []


def test_a_sender_that_waited_in_vain_may_send_more() -> None:
    grants = Grants([route(0)])
    assert grants.arrive(0, waited=True, starves=False)
    assert list(grants.due()) == [(0, 0, 4)]
