"""Scenarios of plans whose machines compute stages together: drawn by hand, random, and as they are predicted."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rpc_runtime.program.measurements import COMPUTE
from rpc_runtime.program.program import CLIENT
from tests.helpers.planner.parts import part
from tests.helpers.planner.profiles import A, B, C, chain_problem, chain_profile
from tests.helpers.scenarios import busiest
from tvm_split.errors import PlanError
from tvm_split.planner.part_prediction import Certificate, predict_parts
from tvm_split.planner.parts import Delivery, PlanParts
from tvm_split.planner.plan import Plan, PlannedMachine
from tvm_split.planner.prediction import CodedLink
from tvm_split.planner.problem import Sharding, Stage
from tvm_split.planner.profile import StreamingCost
from tvm_split.simulation.of_plans import scenario_of_plan, with_measured_compute
from tvm_split.simulation.simulate import Simulation, simulate

FREE = {"bytes_per_second": math.inf, "latency_seconds": 0.0}
JOINED = PlanParts(
    (part("a0", A, 2.0), part("b0", B, 3.0), part("a1", A, 1.0)),
    (
        Delivery("x_a", CLIENT, ("a0",), 50.0),
        Delivery("x_b", CLIENT, ("b0",), 50.0),
        Delivery("half_a", "a0", ("a1",), 100.0),
        Delivery("half_b", "b0", ("a1",), 100.0),
        Delivery("y", "a1", (), 50.0),
    ),
)
"""Two parts and one exchange: what b has made joins what a has."""


def planned(
    parts: PlanParts,
    *,
    transfer_seconds: float = 0.0,
    coded: dict[tuple[str, str], CodedLink] | None = None,
    **links: float,
) -> Plan:
    """A plan that is predicted to consist of these parts."""
    profile = chain_profile({name: [1.0] for name in (A, B, C)}, **links)  # type: ignore[arg-type]
    streaming = StreamingCost(transfer_seconds, 0.0, 1.0, 0.0, 1.0)
    profile = replace(profile, machines=tuple(replace(each, streaming=streaming) for each in profile.machines))
    problem = chain_problem(profile, "latency")
    prediction = predict_parts(problem, profile, parts, Certificate(0.0, "test"), coded)
    machines = tuple(PlannedMachine(name, {"kind": "llvm"}, 1) for name in (A, B, C))
    used = tuple(dict.fromkeys(each.machine for each in parts.parts))
    stage = Stage(used, ("layer_0",), (1 / len(used),) * len(used), "stage", Sharding("rows", "each"))
    return Plan("net", "latency", "test", machines, (stage,), prediction)


def begins(found: Simulation, stage: str) -> list[float]:
    """When it computes which micro-batch."""
    own = [each for each in found.events if (each.stage, each.kind) == (stage, COMPUTE)]
    return [each.start_nanoseconds * 1e-9 for each in own]


def test_one_exchange_of_one_input() -> None:
    """With links that take half a second, and a second for 100 bytes.

    second       0    1    2    3    4    5    6    7
    a            in···a0════════               ··a1══▸client
    b            in···b0═══════════════▸half···
    """
    scenario = scenario_of_plan(planned(JOINED, bytes_per_second=100.0, latency_seconds=0.5))
    found = simulate(scenario, in_flight=1)
    assert found.single is not None
    assert [begins(found, name)[0] for name in ("a0", "b0", "a1")] == pytest.approx([1.0, 1.0, 5.5])
    assert found.single.mean_seconds == pytest.approx(1.0 + 3.0 + 1.5 + 1.0 + 1.0)
    assert found.period_seconds == pytest.approx(found.single.mean_seconds)


def test_one_exchange_in_a_stream() -> None:
    """The last in order goes first, and while one machine waits for the other it begins the next micro-batch.

    second    0   1   2   3   4   5   6   7   8   9
    a         a0══════a0══════a1══a0══════a1══a0═══
    b         b0══════════b0══════════b0══════════
    """
    found = simulate(scenario_of_plan(planned(JOINED, **FREE)))
    assert begins(found, "a0")[:4] == pytest.approx([0.0, 2.0, 5.0, 8.0])
    assert begins(found, "a1")[:3] == pytest.approx([4.0, 7.0, 10.0])
    assert begins(found, "b0")[:4] == pytest.approx([0.0, 3.0, 6.0, 9.0])
    assert found.period_seconds == pytest.approx(3.0)
    assert {each.machine: each.computing for each in found.machines} == pytest.approx({A: 1.0, B: 1.0})


def halos(seconds_a: float, seconds_b: float, last_a: float, last_b: float) -> PlanParts:
    """Two parts on each machine; the second ones take the edges of the other's first."""
    return PlanParts(
        (part("a0", A, seconds_a), part("b0", B, seconds_b), part("a1", A, last_a), part("b1", B, last_b)),
        (
            Delivery("x", CLIENT, ("a0",), 0.0),
            Delivery("x", CLIENT, ("b0",), 0.0),
            Delivery("edge_a", "a0", ("b1",), 100.0),
            Delivery("own_a", "a0", ("a1",), 400.0),
            Delivery("edge_b", "b0", ("a1",), 100.0),
            Delivery("own_b", "b0", ("b1",), 400.0),
            Delivery("y_a", "a1", (), 0.0),
            Delivery("y_b", "b1", (), 0.0),
        ),
    )


def test_halos_go_both_ways_and_no_machine_waits_for_both() -> None:
    parts = halos(2.0, 3.0, 2.0, 1.0)
    found = simulate(scenario_of_plan(planned(parts, bytes_per_second=1000.0, latency_seconds=0.25)), in_flight=1)
    # What stays on a machine crosses nothing: b has the edge of a long before its own part is done.
    assert [begins(found, name)[0] for name in ("a0", "b0", "b1", "a1")] == pytest.approx([0.25, 0.25, 3.25, 3.6])
    assert found.first_seconds == pytest.approx(3.6 + 2.0 + 0.25)


@pytest.mark.parametrize("latency_seconds", [0.001, 0.02, 0.3])
def test_halos_that_take_long_hold_no_stream_up(latency_seconds: float) -> None:
    """The queue in which a machine's own part waits for the other's edge widens, as windows of links do."""
    plan = planned(halos(0.01, 0.01, 0.01, 0.01), bytes_per_second=math.inf, latency_seconds=latency_seconds)
    period = simulate(scenario_of_plan(plan), micro_batches=800).period_seconds
    assert plan.prediction is not None
    assert plan.prediction.period_seconds == pytest.approx(0.02)
    assert period == pytest.approx(0.02, rel=0.05)


def random_parts(seed: int) -> PlanParts:
    """All take something of parts before them or of the client, and all that nobody takes is an output."""
    generator = random.Random(seed)
    names = [f"p{number}" for number in range(generator.randint(1, 9))]
    home = {name: generator.choice((A, B, C)) for name in names}
    seconds = {name: generator.uniform(0.01, 1.0) for name in names}
    parts = tuple(part(name, home[name], seconds[name], seconds[name] * generator.uniform(1, 2)) for name in names)
    deliveries: dict[tuple[str, str], list[str]] = {}
    for number, name in enumerate(names):
        for source in generator.sample([CLIENT, *names[:number]], generator.randint(1, min(number + 1, 3))):
            deliveries.setdefault((source, home[name]), []).append(name)
    taken = {source for source, _ in deliveries}
    size = {name: generator.uniform(1.0, 100.0) for name in (CLIENT, *names)}
    return PlanParts(
        parts,
        (
            *(
                Delivery(f"of_{source}", source, tuple(deliveries[source, machine]), size[source])
                for source in (CLIENT, *names)
                for machine in (A, B, C)
                if (source, machine) in deliveries
            ),
            *(Delivery(f"of_{name}", name, (), size[name]) for name in names if name not in taken),
        ),
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([math.inf, 300.0]), st.sampled_from([0.0, 0.013]))
def test_one_input_takes_what_is_predicted(seed: int, bytes_per_second: float, latency: float) -> None:
    plan = planned(random_parts(seed), bytes_per_second=bytes_per_second, latency_seconds=latency)
    assert plan.prediction is not None
    found = simulate(scenario_of_plan(plan), micro_batches=2)
    assert found.single is not None
    assert found.single.mean_seconds == pytest.approx(plan.prediction.latency_seconds, rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.02]))
def test_parts_are_what_their_machine_does_and_no_stream_is_faster(seed: int, transfer_seconds: float) -> None:
    plan = planned(random_parts(seed), transfer_seconds=transfer_seconds, bytes_per_second=300.0)
    prediction, scenario = plan.prediction, scenario_of_plan(plan)
    assert prediction is not None
    for machine in prediction.machines:
        own = [each for each in prediction.parts if each.machine == machine.machine]
        for field in ("compute_seconds", "alone_seconds", "transfer_seconds"):
            whole = math.fsum(getattr(each, field) for each in own)
            assert whole == pytest.approx(getattr(machine, field), abs=1e-12)
    limit = busiest(scenario)
    assert limit <= prediction.period_seconds * (1 + 1e-9)
    found = simulate(scenario, in_flight=20)
    assert found.period_seconds is not None
    assert found.period_seconds >= limit * (1 - 20 / 150)


def test_codecs_shorten_what_crosses_and_nothing_else() -> None:
    half = {(B, A): CodedLink(0.5, 0.25)}
    links = {"bytes_per_second": 100.0, "latency_seconds": 0.5}
    plain, coded = (scenario_of_plan(planned(JOINED, coded=each, **links)) for each in (None, half))
    assert plain.links[B, A].wire_seconds == pytest.approx({"half_b": 1.0})
    assert coded.links[B, A].wire_seconds == pytest.approx({"half_b": 0.5})
    assert coded.links[CLIENT, A] == plain.links[CLIENT, A]
    assert coded.program == plain.program


def test_what_was_measured_of_a_machine_is_shared_out_over_its_parts() -> None:
    plan = planned(JOINED, transfer_seconds=0.1, **FREE)
    scenario = with_measured_compute(scenario_of_plan(plan), {A: 6.0})
    stages = scenario.machines[A].stages
    # Receiving the input and b's half, and sending the result, come on top.
    assert stages["a0"].stream_seconds == pytest.approx(4.0 + 0.1)
    assert stages["a1"].stream_seconds == pytest.approx(2.0 + 0.2)
    assert (stages["a0"].single_seconds, stages["a1"].single_seconds) == pytest.approx((4.0, 2.0))
    idle = replace(JOINED, parts=tuple(replace(each, seconds=0.0) for each in JOINED.parts))
    measured = with_measured_compute(scenario_of_plan(planned(idle, **FREE)), {A: 6.0}).machines[A]
    assert [each.stream_seconds for each in measured.stages.values()] == [3.0, 3.0]


def test_a_plan_file_has_what_is_simulated() -> None:
    plan = planned(JOINED)
    read = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert read == plan
    assert scenario_of_plan(read) == scenario_of_plan(plan)


def test_plan_files_from_before_are_read_and_to_be_made_anew() -> None:
    content = planned(JOINED).to_dict()
    for name in ("parts", "deliveries"):
        del content["prediction"][name]
    read = Plan.from_dict(json.loads(json.dumps(content)))
    assert read.prediction is not None
    with pytest.raises(PlanError, match=r"the machines of stage compute it together, and .* make the plan anew"):
        scenario_of_plan(read)


def _put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for each in path[:-1]:
            content = content[each]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put("parts", 0, "machine", value="lamp"), "a0 is of stage on 'lamp', and there is no such stage or machine"),
        (_put("parts", 0, "stage", value="other"), "a0 is of other on 'machine-a', and there is no"),
        (_put("parts", 0, "name", value="b0"), "there are two parts b0"),
        (_put("deliveries", 0, "takers", value=["lamp"]), "x_a goes from client to lamp"),
        (_put("deliveries", 2, "source", value="lamp"), "half_a goes from lamp to a1, which does not follow it"),
        (_put("deliveries", 2, "source", value="a1"), "half_a goes from a1 to a1, which does not follow it"),
        (_put("deliveries", 4, "source", value="lamp"), "y goes from lamp to client"),
        (_put("deliveries", 3, "tensor", value="half_a"), "half_a is made by a0 and by b0"),
        (_put("deliveries", 2, "takers", value=["client"]), "half_a goes to a part named 'client'"),
        (_put("deliveries", value=[]), "a0 takes nothing"),
        (_put("links", value=[]), "nothing is predicted of the link from client to machine-a"),
    ],
)
def test_what_does_not_fit_together_is_named(change: Callable[[dict[str, Any]], None], words: str) -> None:
    content = json.loads(json.dumps(planned(JOINED).to_dict()))
    change(content["prediction"])
    with pytest.raises(PlanError, match=f"prediction does not fit together: {words}"):
        scenario_of_plan(Plan.from_dict(content))


@pytest.mark.parametrize(("transport", "shares"), [("shm", True), ("grpc", False), ("", False)])
def test_links_of_parts_lie_in_memory_as_those_of_stages(transport: str, shares: bool) -> None:
    plan = planned(JOINED)
    assert plan.prediction is not None
    links = tuple(replace(each, transport=transport) for each in plan.prediction.links)
    scenario = scenario_of_plan(replace(plan, prediction=replace(plan.prediction, links=links)))
    assert {each.shares_memory for each in scenario.links.values()} == {shares}
