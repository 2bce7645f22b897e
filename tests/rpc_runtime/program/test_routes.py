"""Routes, numbers and queue depths follow from the program alone."""

import pytest

from rpc_runtime.program.program import Program
from rpc_runtime.program.round_robin import EVERY, Recurrence
from rpc_runtime.program.routes import CLIENT, queue_depth
from rpc_runtime.program.specs import NO_BLOB
from tests.helpers.rpc_runtime.specs import replicas, stage, tensor


def skipping() -> Program:
    """Return x → a(A) → b(B) → c(A) with a skip from a to c; the client also needs a's output."""
    stages = (stage(0, "a", "A", "x", "t"), stage(1, "b", "B", "t", "u"), stage(2, "c", "A", "t u x", "y"))
    return Program((tensor("x"),), (tensor("y"), tensor("t"), tensor("x")), stages)


def test_queue_depth_is_three_and_the_micro_batches_of_the_route_in_the_window() -> None:
    assert [queue_depth(EVERY, window) for window in (0, 2, 8)] == [3, 5, 11]
    assert [queue_depth(Recurrence(3, (0, 2)), window) for window in (0, 1, 2, 3, 4)] == [3, 4, 5, 5, 6]


def test_routes_of_a_skip_connection() -> None:
    depths = {(r.tensor.name, r.source, r.destination): r.depth for r in skipping().handovers}
    assert depths == {
        ("x", CLIENT, "A"): 7,  # needed at depths 1 and 3: the larger one counts
        ("t", "A", "B"): 3,
        ("t", "A", "A"): 5,
        ("u", "B", "A"): 3,
        ("y", "A", CLIENT): 3,
        ("t", "A", CLIENT): 7,
    }


def test_a_machine_sees_its_part() -> None:
    plan = skipping().on("A")
    coming, leaving = (
        {machine: [route.tensor.name for route in routes] for machine, routes in routes_by_machine.items()}
        for routes_by_machine in (plan.by_source, plan.by_destination)
    )
    assert (coming, leaving) == ({CLIENT: ["x"], "B": ["u"]}, {"B": ["t"], CLIENT: ["y", "t"]})
    assert list(skipping().on(CLIENT).by_source) == ["A"]


def replicated() -> Program:
    """Return x → a(A) → b(B twice, C once in three) → c(A) with a skip from a to c."""
    stages = (
        stage(0, "a", "A", "x", "t"),
        *replicas(stage(1, "b", "B", "t", "u"), "BC", "010"),
        stage(2, "c", "A", "t u", "y"),
    )
    return Program((tensor("x"),), (tensor("y"),), stages)


def test_routes_of_a_replicated_stage() -> None:
    routes = {(r.tensor.name, r.source, r.destination): (r.when, r.depth) for r in replicated().handovers}
    twice, once = Recurrence(3, (0, 2)), Recurrence(3, (1,))
    assert routes == {
        ("x", CLIENT, "A"): (EVERY, 3),
        ("t", "A", "B"): (twice, 3),
        ("t", "A", "C"): (once, 3),
        ("t", "A", "A"): (EVERY, 7),  # C computes one micro-batch while B computes two others
        ("u", "B", "A"): (twice, 5),  # both wait for it
        ("u", "C", "A"): (once, 4),
        ("y", "A", CLIENT): (EVERY, 3),
    }


def test_routes_between_replicas_that_never_meet() -> None:
    first, second = stage(0, "a", "A", "x", "t"), stage(1, "b", "C", "t", "y")
    program = Program((tensor("x"),), (tensor("y"),), (*replicas(first, "AB", "01"), *replicas(second, "BC", "10")))
    whens = {(r.tensor.name, r.source, r.destination): r.when for r in program.handovers}
    assert whens == {
        ("x", CLIENT, "A"): Recurrence(2, (0,)),
        ("x", CLIENT, "B"): Recurrence(2, (1,)),
        ("t", "A", "C"): Recurrence(2, (0,)),
        ("t", "B", "B"): Recurrence(2, (1,)),
        ("y", "C", CLIENT): Recurrence(2, (0,)),
        ("y", "B", CLIENT): Recurrence(2, (1,)),
    }


@pytest.mark.parametrize("program", [skipping(), replicated()], ids=["skip", "replicas"])
def test_both_ends_derive_the_same_part(program: Program) -> None:
    """The program sent to a worker lacks what others compute, and gives the same part for its machine."""
    for machine in program.machines:
        sent = program.for_worker(machine)
        assert sent.on(machine) == program.on(machine)
        assert all(stage.library == NO_BLOB for stage in sent.stages if stage.machine != machine)
