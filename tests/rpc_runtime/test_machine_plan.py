"""Routes, numbers and queue depths follow from the program alone."""

from __future__ import annotations

import pytest

from rpc_runtime.errors import ProtocolError
from rpc_runtime.machine_plan import machine_plan, planned_routes, queue_depth
from rpc_runtime.messages import load_request, plan_from_request
from rpc_runtime.program import CLIENT, BlobSpec, Program, StageSpec, TensorSpec

BLOB = BlobSpec("0" * 64, 1)


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name, (2,), "float32")


def stage(index: int, name: str, machine: str, inputs: str, outputs: str) -> StageSpec:
    wanted, made = tuple(map(tensor, inputs.split())), tuple(map(tensor, outputs.split()))
    return StageSpec(index, name, machine, (), "cpu", BLOB, (), wanted, made)


def skipping() -> Program:
    """x → a(A) → b(B) → c(A), with a skip from a to c, a's output also wanted by the client."""
    stages = (stage(0, "a", "A", "x", "t"), stage(1, "b", "B", "t", "u"), stage(2, "c", "A", "t u x", "y"))
    return Program((tensor("x"),), (tensor("y"), tensor("t"), tensor("x")), stages)


def test_queue_depth_is_twice_the_distance_and_one() -> None:
    assert [queue_depth(0, d) for d in (1, 2, 5)] == [3, 5, 11]


def test_routes_of_a_skip_connection() -> None:
    found = {(r.tensor.name, r.source, r.destination): r.queue_depth for r in planned_routes(skipping())}
    assert found == {
        ("x", CLIENT, "A"): 7,  # wanted at depths 1 and 3: the larger one counts
        ("t", "A", "B"): 3,
        ("t", "A", "A"): 5,
        ("u", "B", "A"): 3,
        ("y", "A", CLIENT): 3,
        ("t", "A", CLIENT): 7,
    }


def test_a_machine_sees_its_part() -> None:
    plan = machine_plan(skipping(), "A")
    assert (plan.sources, plan.destinations) == ((CLIENT, "B"), ("B", CLIENT))
    assert plan.consumers("t") == ((1, 0),)
    assert plan.consumers("x") == ((0, 0), (1, 2))
    assert machine_plan(skipping(), CLIENT).sources == ("A",)


@pytest.mark.parametrize("machine", ["A", "B"])
def test_the_plan_survives_the_wire(machine: str) -> None:
    plan = machine_plan(skipping(), machine)
    assert plan_from_request(load_request("d", plan)) == plan


def test_a_request_that_does_not_fit_is_refused() -> None:
    request = load_request("d", machine_plan(skipping(), "B"))
    del request.routes[:]
    with pytest.raises(ProtocolError, match="no route supplies it"):
        plan_from_request(request)
    request = load_request("d", machine_plan(skipping(), "B"))
    request.stages[0].library.sha256 = "../../etc/passwd"
    with pytest.raises(ProtocolError, match="64 lowercase"):
        plan_from_request(request)
    request = load_request("d", machine_plan(skipping(), "B"))
    request.stages[0].inputs[0].dtype = "nonsense"
    with pytest.raises(ProtocolError, match="unknown dtype"):
        plan_from_request(request)
    request = load_request("d", machine_plan(skipping(), "B"))
    request.routes[0].tensor.shape[0] = 2**50
    with pytest.raises(ProtocolError, match="at most"):
        plan_from_request(request)
