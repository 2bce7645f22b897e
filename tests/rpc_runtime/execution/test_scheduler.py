"""The scheduling of a machine's stages, without threads, and with imitated links."""

from collections.abc import Callable

import pytest

from rpc_runtime.execution.scheduler import Scheduler
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec
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
    scheduler, shelf = Scheduler(program.on("box"), lambda: roused.append("ready")), Shelf(places)
    scheduler.connect({"client": shelf})
    scheduler.begin()
    return scheduler, shelf, roused


def give(scheduler: Scheduler, tensor: str, sequence: int, value: object, release: Callable[[], None]) -> None:
    """Give the machine a tensor that it received."""
    route = Route(0, TensorSpec(tensor, (1,), "uint8"), "elsewhere", "box", 1)
    scheduler.give(route, sequence, value, release)


def next_of(scheduler: Scheduler) -> int | None:
    """Return the position of the stage to compute now."""
    state = scheduler.next_stage()
    return None if state is None else state.position


def test_what_is_nearest_to_the_output_computes_first_and_inputs_are_released_when_they_are_used() -> None:
    scheduler, shelf, roused = two_stages(places=1)
    released: list[int] = []
    assert (next_of(scheduler), scheduler.blocked()) == (None, None)
    for sequence in (0, 1):
        give(scheduler, "x", sequence, f"x{sequence}", lambda sequence=sequence: released.append(sequence))
    assert roused == ["ready"]
    assert next_of(scheduler) == 0
    assert next(iter(scheduler)).inputs == ["x0"]
    assert released == []
    scheduler.finish(next(iter(scheduler)), ["y0"])
    assert released == [0]
    assert next_of(scheduler) == 1
    scheduler.finish(list(scheduler)[1], ["z0"])
    assert shelf.held == [("z", 0, "z0")]
    assert next_of(scheduler) == 0
    scheduler.finish(next(iter(scheduler)), ["y1"])
    assert next_of(scheduler) is None
    assert scheduler.blocked() == (list(scheduler)[1].stage, 1, "client")  # z0 has not left
    shelf.held.clear()
    scheduler.room()
    assert next_of(scheduler) == 1
    assert [state.finished for state in scheduler] == [2, 1]


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
    scheduler, shelf = Scheduler(program.on("box"), lambda: None), Shelf(places)
    scheduler.connect({"other": shelf, "client": Shelf(1000)})
    scheduler.begin()
    return scheduler, shelf


def computed_ahead(scheduler: Scheduler, inputs: int) -> int:
    """Return how often the first part computes while nothing arrives from the neighbour."""
    for sequence in range(inputs):
        give(scheduler, "x", sequence, None, lambda: None)
    while next_of(scheduler) == 0:
        scheduler.finish(next(iter(scheduler)), [None, None])
    assert next_of(scheduler) is None
    return next(iter(scheduler)).finished


def test_what_a_machine_keeps_for_itself_holds_it_up_no_earlier_than_its_neighbour_does() -> None:
    scheduler, shelf = exchanging(places=5)
    assert computed_ahead(scheduler, 20) == 5
    shelf.held.clear()
    scheduler.room()
    assert next_of(scheduler) == 0


@pytest.mark.parametrize(("size_bytes", "more"), [(1, MOST_MORE), (MOST_MORE_BYTES // 2, 2), (MOST_MORE_BYTES + 1, 0)])
def test_a_machine_keeps_no_more_for_itself_than_a_link_has_under_way(size_bytes: int, more: int) -> None:
    scheduler, _ = exchanging(places=1000, retained=TensorSpec("y", (size_bytes,), "uint8"))
    assert computed_ahead(scheduler, 400) == 3 + more
    # Queued tensors are used in order when the neighbour has caught up.
    for sequence in range(3 + more):
        give(scheduler, "halo_other", sequence, None, lambda: None)
        assert next_of(scheduler) == 1
        scheduler.finish(list(scheduler)[1], [None])


def test_a_queue_whose_taker_waits_for_room_stays_as_it_is() -> None:
    scheduler, _, _ = two_stages(places=0)
    for sequence in range(10):
        give(scheduler, "x", sequence, None, lambda: None)
    for _ in range(3):
        assert next_of(scheduler) == 0
        scheduler.finish(next(iter(scheduler)), [None])
    assert next_of(scheduler) is None
    assert scheduler.blocked().destination == "client"


def test_who_starves() -> None:
    scheduler, _ = exchanging(places=5)
    assert scheduler.starves("x", 0)
    assert scheduler.starves("halo_other", 0)
    give(scheduler, "x", 0, None, lambda: None)
    assert not scheduler.starves("halo_other", 0)  # a stage can compute
    scheduler.finish(next(iter(scheduler)), [None, None])
    assert scheduler.starves("x", 1)
    assert scheduler.starves("halo_other", 0)
    give(scheduler, "halo_other", 0, None, lambda: None)
    scheduler.finish(list(scheduler)[1], [None])
    stuck, _, _ = two_stages(places=0)
    for sequence in range(2):
        give(stuck, "x", sequence, None, lambda: None)
    stuck.finish(next(iter(stuck)), [None])
    stuck.finish(next(iter(stuck)), [None])
    assert next_of(stuck) is None
    assert stuck.starves("x", 2)
    give(stuck, "x", 2, None, lambda: None)
    stuck.finish(next(iter(stuck)), [None])
    give(stuck, "x", 3, None, lambda: None)
    assert not stuck.starves("x", 4)  # the next one has arrived, and there is no room for it


def test_the_order_that_the_module_draws() -> None:
    tensors = [TensorSpec(name, (1,), "uint8") for name in "xabz"]
    stages = [
        StageSpec(index, name, machine, (name,), "cpu", BLOB, (), (tensors[index],), (tensors[index + 1],))
        for index, (name, machine) in enumerate((("a", "box"), ("b", "other"), ("c", "box")))
    ]
    scheduler, sent = Scheduler(Program((X,), tensors[-1:], tuple(stages)).on("box"), lambda: None), Shelf(1000)
    scheduler.connect({"other": sent, "client": Shelf(1000)})
    scheduler.begin()
    for sequence in range(3):
        give(scheduler, "x", sequence, None, lambda: None)
    order, done_elsewhere = [], 0
    for _ in range(7):
        elsewhere_can = done_elsewhere < len(sent.held)
        if (state := scheduler.next_stage()) is None:
            order.append(".")
        else:
            order.append(f"{state.stage.name}{state.sequence}")
            scheduler.finish(state, [None])
        if elsewhere_can:
            give(scheduler, "b", done_elsewhere, None, lambda: None)
            done_elsewhere += 1
    assert order == ["a0", "a1", "c0", "c1", "a2", ".", "c2"]
