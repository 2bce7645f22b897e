"""The rules by which a machine's stages compute, by themselves: no threads, no links but made-up ones."""

from __future__ import annotations

from tvm_split.rpc_runtime.execution.stage_order import Compute, Wait
from tvm_split.rpc_runtime.execution.stations import Stations
from tvm_split.rpc_runtime.program.machine_plan import machine_plan
from tvm_split.rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec

BLOB = BlobSpec("0" * 64, 0)
X, Y, Z = (TensorSpec(name, (1,), "uint8") for name in "xyz")


class Shelf:
    """A link with so many places."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.held: list[tuple[str, int, object]] = []

    def has_room_locked(self, tensor: str) -> bool:
        return len(self.held) < self.places

    def put_locked(self, tensor: str, sequence: int, value: object) -> None:
        self.held.append((tensor, sequence, value))


def stage(index: int, takes: TensorSpec, makes: TensorSpec) -> StageSpec:
    return StageSpec(index, f"stage_{index}", "box", (f"l{index}",), "cpu", BLOB, (), (takes,), (makes,))


def two_stages(places: int) -> tuple[Stations, Shelf, list[str]]:
    program = Program((X,), (Z,), (stage(0, X, Y), stage(1, Y, Z)))
    roused: list[str] = []
    stations, shelf = Stations(machine_plan(program, "box"), lambda: roused.append("ready")), Shelf(places)
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
