"""The scheduling of a machine's stages, without threads, and with imitated links."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.execution.scheduler import Compute, Readiness, Scheduler, Wait, next_action
from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from rpc_runtime.transports.credits import MOST_MORE, MOST_MORE_BYTES

BLOB = BlobSpec("0" * 64, 0)
X, Y, Z = (TensorSpec(name, (1,), "uint8") for name in "xyz")


class Shelf:
    """A link with a number of slots."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.held: list[tuple[str, int, object]] = []

    def has_room_locked(self, tensor: str) -> bool:
        return len(self.held) < self.places

    def put_locked(self, tensor: str, sequence: int, value: object) -> None:
        self.held.append((tensor, sequence, value))


def stage(index: int, takes: TensorSpec, makes: TensorSpec) -> StageSpec:
    return StageSpec(index, f"stage_{index}", "box", (f"l{index}",), "cpu", BLOB, (), (takes,), (makes,))


def two_stages(places: int) -> tuple[Scheduler, Shelf, list[str]]:
    program = Program((X,), (Z,), (stage(0, X, Y), stage(1, Y, Z)))
    roused: list[str] = []
    stations, shelf = Scheduler(program.on("box"), lambda: roused.append("ready")), Shelf(places)
    stations.connect({"client": shelf})
    stations.begin()
    return stations, shelf, roused


def test_what_is_nearest_to_the_output_computes_first_and_inputs_are_released_when_they_are_used() -> None:
    stations, shelf, roused = two_stages(places=1)
    released: list[int] = []
    assert stations.next_action() == Wait(for_inputs=True)
    for sequence in (0, 1):
        stations.give("x", sequence, f"x{sequence}", lambda sequence=sequence: released.append(sequence))
    assert roused == ["ready"]
    assert stations.next_action() == Compute(0)
    assert stations.at(0).inputs == ["x0"]
    assert released == []
    stations.finish(0, ["y0"])
    assert released == [0]
    assert stations.next_action() == Compute(1)
    stations.finish(1, ["z0"])
    assert shelf.held == [("z", 0, "z0")]
    assert stations.next_action() == Compute(0)
    stations.finish(0, ["y1"])
    assert stations.next_action() == Wait(for_inputs=False)  # z0 has not left
    shelf.held.clear()
    stations.room()
    assert stations.next_action() == Compute(1)
    assert [station.finished for station in stations] == [2, 1]


def test_nothing_computes_after_everything_was_cleared() -> None:
    stations, _, _ = two_stages(places=1)
    stations.give("x", 0, "x0", lambda: None)
    stations.clear()
    stations.room()
    assert stations.at(0).queues[0].held == {}


def exchanging(places: int, retained: TensorSpec = Y) -> tuple[Scheduler, Shelf]:
    """A machine that keeps ``retained`` for its second part, sends a halo, and waits for its neighbour's halo."""
    halos = [TensorSpec(f"halo_{name}", (1,), "uint8") for name in ("box", "other")]
    blank = ("cpu", BLOB, ())
    program = Program(
        (X,),
        (Z,),
        (
            StageSpec(0, "first", "box", ("l0",), *blank, (X,), (retained, halos[0])),
            StageSpec(1, "neighbour", "other", ("l0",), *blank, (X,), (halos[1],)),
            StageSpec(2, "second", "box", ("l1",), *blank, (retained, halos[1]), (Z,)),
            StageSpec(3, "end", "other", ("l1",), *blank, (halos[0],), ()),
        ),
    )
    stations, shelf = Scheduler(program.on("box"), lambda: None), Shelf(places)
    stations.connect({"other": shelf, "client": Shelf(1000)})
    stations.begin()
    return stations, shelf


def computed_ahead(stations: Scheduler, inputs: int) -> int:
    """Return how often the first part computes while nothing arrives from the neighbour."""
    for sequence in range(inputs):
        stations.give("x", sequence, None, lambda: None)
    while stations.next_action() == Compute(0):
        stations.finish(0, [None, None])
    assert isinstance(stations.next_action(), Wait)
    return stations.at(0).finished


def test_what_a_machine_keeps_for_itself_holds_it_up_no_earlier_than_its_neighbour_does() -> None:
    stations, shelf = exchanging(places=5)
    assert computed_ahead(stations, 20) == 5
    shelf.held.clear()
    stations.room()
    assert stations.next_action() == Compute(0)


@pytest.mark.parametrize(("size_bytes", "more"), [(1, MOST_MORE), (MOST_MORE_BYTES // 2, 2), (MOST_MORE_BYTES + 1, 0)])
def test_a_machine_keeps_no_more_for_itself_than_a_link_has_under_way(size_bytes: int, more: int) -> None:
    stations, _ = exchanging(places=1000, retained=TensorSpec("y", (size_bytes,), "uint8"))
    assert computed_ahead(stations, 400) == 3 + more
    # Queued tensors are used in order when the neighbour has caught up.
    for sequence in range(3 + more):
        stations.give("halo_other", sequence, None, lambda: None)
        assert stations.next_action() == Compute(1)
        stations.finish(1, [None])


def test_a_queue_whose_taker_waits_for_room_stays_as_it_is() -> None:
    stations, _, _ = two_stages(places=0)
    for sequence in range(10):
        stations.give("x", sequence, None, lambda: None)
    for _ in range(3):
        assert stations.next_action() == Compute(0)
        stations.finish(0, [None])
    assert stations.next_action() == Wait(for_inputs=False)


def test_who_starves() -> None:
    stations, _ = exchanging(places=5)
    assert stations.starves("x", 0)
    assert stations.starves("halo_other", 0)
    stations.give("x", 0, None, lambda: None)
    assert not stations.starves("halo_other", 0)  # a stage can compute
    stations.finish(0, [None, None])
    assert stations.starves("x", 1)
    assert stations.starves("halo_other", 0)
    stations.give("halo_other", 0, None, lambda: None)
    stations.finish(1, [None])
    stuck, _, _ = two_stages(places=0)
    for sequence in range(2):
        stuck.give("x", sequence, None, lambda: None)
    stuck.finish(0, [None])
    stuck.finish(0, [None])
    assert isinstance(stuck.next_action(), Wait)
    assert stuck.starves("x", 2)
    stuck.give("x", 2, None, lambda: None)
    stuck.finish(0, [None])
    stuck.give("x", 3, None, lambda: None)
    assert not stuck.starves("x", 4)  # the next one has arrived, and there is no room for it


READY, LACKS_INPUTS, LACKS_ROOM, AHEAD = Readiness


@given(st.lists(st.sampled_from(Readiness), max_size=8))
def test_it_computes_the_last_that_can(stages: list[Readiness]) -> None:
    action = next_action(stages)
    if READY in stages:
        assert isinstance(action, Compute)
        assert stages[action.stage] is READY
        assert READY not in stages[action.stage + 1 :]
    else:
        assert action == Wait(for_inputs=LACKS_ROOM not in stages)


@pytest.mark.parametrize(
    ("stages", "for_inputs"),
    [([LACKS_INPUTS], True), ([AHEAD], True), ([AHEAD, LACKS_INPUTS], True), ([LACKS_INPUTS, LACKS_ROOM], False)],
)
def test_what_a_machine_waits_for(stages: list[Readiness], for_inputs: bool) -> None:
    assert next_action(stages) == Wait(for_inputs)


def test_the_order_that_the_module_draws() -> None:
    finished, done_elsewhere, order = {"a": 0, "c": 0}, 0, []
    for _ in range(7):
        states = [
            READY if finished["a"] < 3 else LACKS_INPUTS,
            READY if finished["c"] < done_elsewhere else LACKS_INPUTS,
        ]
        elsewhere_can = done_elsewhere < finished["a"]
        action = next_action(states)
        if isinstance(action, Compute):
            name = "ac"[action.stage]
            order.append(f"{name}{finished[name]}")
            finished[name] += 1
        else:
            order.append(".")
        done_elsewhere += elsewhere_can
    assert order == ["a0", "a1", "c0", "c1", "a2", ".", "c2"]


@given(st.data())
def test_a_chain_on_one_machine_never_sticks_and_stays_bounded(data: st.DataObject) -> None:
    length, batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    room = data.draw(st.lists(st.integers(1, 3), min_size=length, max_size=length))
    finished = [0] * length
    for _ in range(length * batches):
        stages = []
        for i in range(length):
            arrived = batches if i == 0 else finished[i - 1]
            ahead = finished[i] - finished[i + 1] if i + 1 < length else 0
            waiting = LACKS_ROOM if ahead >= room[i] else READY
            stages.append(waiting if finished[i] < arrived else LACKS_INPUTS)
        action = next_action(stages)
        assert isinstance(action, Compute)
        finished[action.stage] += 1
    assert finished == [batches] * length
