"""Routes, numbers and queue depths follow from the program alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.machine_plan import machine_plan, planned_routes, queue_depth
from rpc_runtime.program.program import CLIENT, Program
from rpc_runtime.program.turns import EVERY, Recurrence
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.messages import (
    LINK_SECRET_BYTES,
    link_secrets,
    load_request,
    plan_from_request,
)
from tests.helpers.rpc_runtime.specs import replicas, stage, tensor


def skipping() -> Program:
    """x → a(A) → b(B) → c(A), with a skip from a to c, a's output also wanted by the client."""
    stages = (stage(0, "a", "A", "x", "t"), stage(1, "b", "B", "t", "u"), stage(2, "c", "A", "t u x", "y"))
    return Program((tensor("x"),), (tensor("y"), tensor("t"), tensor("x")), stages)


def test_queue_depth_is_three_and_the_turns_of_the_route_in_the_window() -> None:
    assert [queue_depth(EVERY, window) for window in (0, 2, 8)] == [3, 5, 11]
    assert [queue_depth(Recurrence(3, (0, 2)), window) for window in (0, 1, 2, 3, 4)] == [3, 4, 5, 5, 6]


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
    coming, leaving = (
        {machine: [route.tensor.name for route in routes] for machine, routes in each.items()}
        for each in (plan.by_source, plan.by_destination)
    )
    assert (coming, leaving) == ({CLIENT: ["x"], "B": ["u"]}, {"B": ["t"], CLIENT: ["y", "t"]})
    assert list(machine_plan(skipping(), CLIENT).by_source) == ["A"]


@pytest.mark.parametrize("machine", ["A", "B"])
def test_the_plan_survives_the_wire(machine: str) -> None:
    plan = machine_plan(skipping(), machine)
    assert plan_from_request(load_request("d", plan, {})) == plan


def test_a_request_that_does_not_fit_is_refused() -> None:
    request = load_request("d", machine_plan(skipping(), "B"), {})
    del request.routes[:]
    with pytest.raises(ProtocolError, match="no route supplies it"):
        plan_from_request(request)
    request = load_request("d", machine_plan(skipping(), "B"), {})
    request.stages[0].library.sha256 = "../../etc/passwd"
    with pytest.raises(ProtocolError, match="64 lowercase"):
        plan_from_request(request)
    request = load_request("d", machine_plan(skipping(), "B"), {})
    request.stages[0].inputs[0].dtype = "nonsense"
    with pytest.raises(ProtocolError, match="unknown dtype"):
        plan_from_request(request)
    request = load_request("d", machine_plan(skipping(), "B"), {})
    request.routes[0].tensor.shape[0] = 2**50
    with pytest.raises(ProtocolError, match="at most"):
        plan_from_request(request)


def replicated() -> Program:
    """x → a(A) → b(B twice, C once of three) → c(A), with a skip from a to c."""
    stages = (
        stage(0, "a", "A", "x", "t"),
        *replicas(stage(1, "b", "B", "t", "u"), "BC", "010"),
        stage(2, "c", "A", "t u", "y"),
    )
    return Program((tensor("x"),), (tensor("y"),), stages)


def test_routes_of_a_replicated_stage() -> None:
    found = {(r.tensor.name, r.source, r.destination): (r.when, r.queue_depth) for r in planned_routes(replicated())}
    twice, once = Recurrence(3, (0, 2)), Recurrence(3, (1,))
    assert found == {
        ("x", CLIENT, "A"): (EVERY, 3),
        ("t", "A", "B"): (twice, 3),
        ("t", "A", "C"): (once, 3),
        ("t", "A", "A"): (EVERY, 7),  # C computes one micro-batch while B is done with two others
        ("u", "B", "A"): (twice, 5),  # both of which wait for it
        ("u", "C", "A"): (once, 4),
        ("y", "A", CLIENT): (EVERY, 3),
    }


def test_routes_between_replicas_that_never_meet() -> None:
    first, second = stage(0, "a", "A", "x", "t"), stage(1, "b", "C", "t", "y")
    program = Program((tensor("x"),), (tensor("y"),), (*replicas(first, "AB", "01"), *replicas(second, "BC", "10")))
    found = {(r.tensor.name, r.source, r.destination): r.when for r in planned_routes(program)}
    assert found == {
        ("x", CLIENT, "A"): Recurrence(2, (0,)),
        ("x", CLIENT, "B"): Recurrence(2, (1,)),
        ("t", "A", "C"): Recurrence(2, (0,)),
        ("t", "B", "B"): Recurrence(2, (1,)),
        ("y", "C", CLIENT): Recurrence(2, (0,)),
        ("y", "B", CLIENT): Recurrence(2, (1,)),
    }


@pytest.mark.parametrize("machine", ["A", "B", "C"])
def test_the_plan_of_a_replica_survives_the_wire(machine: str) -> None:
    plan = machine_plan(replicated(), machine)
    assert plan.period == 3
    assert plan_from_request(load_request("d", plan, {})) == plan


def test_a_request_whose_turns_do_not_fit_is_refused() -> None:
    def refused(machine: str, change: Callable[[pb.LoadStagesRequest], None], words: str) -> None:
        request = load_request("d", machine_plan(replicated(), machine), {})
        change(request)
        with pytest.raises(ProtocolError, match=words):
            plan_from_request(request)

    def route(request: pb.LoadStagesRequest, name: str, source: str, destination: str) -> pb.Route:
        ends = (name, source, destination)
        return next(r for r in request.routes if (r.tensor.name, r.source, r.destination) == ends)

    def set_remainders(request: pb.LoadStagesRequest, ends: tuple[str, str, str], values: list[int]) -> None:
        route(request, *ends).remainders[:] = values

    from_b = ("u", "B", "A")
    refused("A", lambda r: set_remainders(r, from_b, [0]), "stage 'c' takes u.*no route supplies it")
    refused("A", lambda r: set_remainders(r, from_b, [0, 1, 2]), "stage 'c' takes u.*several routes")
    refused("A", lambda r: set_remainders(r, from_b, [2, 0]), "route of tensor 'u'.*ascend")
    refused("B", lambda r: set_remainders(r, from_b, [0, 1]), "no stage of machine 'B' makes it")
    refused("B", lambda r: set_remainders(r, ("t", "A", "B"), [0, 1, 2]), "no stage takes it in that turn")
    refused("B", lambda r: setattr(route(r, *from_b), "period", 16_385), "a period of 1 to 16384, not 16385")
    refused("B", lambda r: setattr(route(r, *from_b), "period", 0), "a period of 1 to 16384, not 0")
    refused("B", lambda r: setattr(route(r, *from_b), "period", 5_471), "machine 'B': turns repeat together after more")
    refused("B", lambda r: setattr(r.stages[0], "replica", 7), "stage 'b', replica 7")
    refused("B", lambda r: r.stages[0].ClearField("turns"), "stage 'b', replica 0")


def test_every_link_between_machines_has_a_secret() -> None:
    plan = machine_plan(skipping(), "B")
    secrets = {link: bytes([number] * LINK_SECRET_BYTES) for number, link in enumerate(plan.links)}
    assert secrets
    assert all("B" in link and CLIENT not in link for link in secrets)
    assert link_secrets(load_request("d", plan, secrets), plan) == secrets
    link = plan.links[0]
    for wrong in (secrets[link][1:], b""):
        request = load_request("d", plan, {**secrets, link: wrong})
        with pytest.raises(ProtocolError, match=f"the link from '{link[0]}' to '{link[1]}' has no secret"):
            link_secrets(request, plan)
    with pytest.raises(ProtocolError, match="has no secret"):
        link_secrets(load_request("d", plan, {}), plan)


@pytest.mark.parametrize(
    "dtype", ["02ded11b", "O", "object", "f4", "float", "float32,float32", "str", "void", "(2,)f4", ""]
)
def test_a_dtype_that_is_none_is_refused(dtype: str) -> None:
    plan = machine_plan(replicated(), "A")
    request = load_request("d", plan, dict.fromkeys(plan.links, bytes(LINK_SECRET_BYTES)))
    request.routes[0].tensor.dtype = dtype
    with pytest.raises(ProtocolError, match="unknown dtype"):
        plan_from_request(request)
