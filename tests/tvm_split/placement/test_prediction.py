"""Predictions of plans, from numbers that can be added up by hand."""

import dataclasses
import math

import pytest

from tests.helpers.placement.profiles import A, B, C, chain_problem, chain_profile, predicted
from tvm_split.placement.baselines import ONE_MACHINE
from tvm_split.placement.prediction import CodedLink
from tvm_split.placement.problem import Stage
from tvm_split.placement.profile import ClusterProfile, Corrections, PieceTime

FAST = {"bytes_per_second": 1e9, "latency_seconds": 1e-4}
HALVES = (Stage((A,), ("layer_0", "layer_1")), Stage((B,), ("layer_2",)))


def test_the_best_plan():
    profile = chain_profile(
        {A: [0.002, 0.003, 0.004], B: [0.002, 0.003, 0.004]}, contention=1.1, hostname="box", **FAST
    )
    problem = chain_problem(profile)
    prediction = predicted(problem, profile)
    assert prediction.period_seconds == pytest.approx(0.005 * 1.1)
    assert prediction.latency_seconds == pytest.approx(0.009 + 3 * (1e-4 + 1e-6))
    assert prediction.in_flight == 4
    assert prediction.bubble == pytest.approx(1 - (5 + 4) / 10)
    assert prediction.gap == 0
    assert "compute of machine-a" in prediction.limiting
    first, second = prediction.machines
    assert (first.machine, second.machine) == (A, B)
    assert first.compute_seconds == pytest.approx(0.0055)
    assert first.alone_seconds == pytest.approx(0.005)
    assert second.receive_seconds == pytest.approx(1e-6)
    assert (first.weight_bytes, first.memory_limit_bytes, first.estimated_share) == (200, None, 0)
    assert [(link.source, link.destination, link.bytes) for link in prediction.links] == [
        ("client", A, 1000),
        (A, B, 1000),
        (B, "client", 1000),
    ]
    assert prediction.links[1].seconds == pytest.approx(1e-4 + 1e-6)
    assert prediction.links[1].stream_seconds == pytest.approx(1e-6)
    assert prediction.corrections == Corrections()
    assert prediction.profiled_at == 1000.0


def test_codecs_make_links_faster_and_their_bytes_fewer():
    """A link with half of the bandwidth that is needed: 1000 bytes take 10 ms, with a codec 4 ms."""
    profile = chain_profile(
        {A: [0.002, 0.003, 0.004], B: [0.002, 0.003, 0.004]}, bytes_per_second=1e5, latency_seconds=1e-3
    )
    problem = chain_problem(profile)
    plain = predicted(problem, profile, HALVES)
    assert plain.period_seconds == pytest.approx(0.010)
    ends = [("client", A), (A, B), (B, "client")]
    coded = predicted(problem, profile, HALVES, dict.fromkeys(ends, CodedLink(0.4, 0.25)))
    assert coded.period_seconds == pytest.approx(0.005)
    assert coded.latency_seconds == pytest.approx(0.009 + 3 * (1e-3 + 0.004))
    assert "compute of machine-a" in coded.limiting
    assert [link.bytes for link in coded.links] == [250, 250, 250]
    assert [link.stream_seconds for link in coded.links] == pytest.approx([0.004] * 3)
    assert coded.machines[1].receive_seconds == pytest.approx(0.004)
    assert coded.lower_bound_seconds == pytest.approx(0.005)
    assert coded.gap == 0
    assert coded.in_flight == math.ceil(0.024 / 0.005) + 2
    assert coded.bubble == pytest.approx(1 - (5 + 4) / 10)
    one_coded = predicted(problem, profile, HALVES, {(A, B): CodedLink(0.4, 0.25)})
    assert one_coded.period_seconds == pytest.approx(0.010)
    assert [link.bytes for link in one_coded.links] == [1000, 250, 1000]


def test_another_plan_is_held_against_the_best_bound():
    profile = chain_profile({A: [0.002, 0.003, 0.004], B: [0.002, 0.003, 0.004]}, **FAST)
    problem = chain_problem(profile)
    stages = (Stage((A,), ("layer_0",)), Stage((B,), ("layer_1", "layer_2")))
    prediction = predicted(problem, profile, stages)
    assert prediction.lower_bound_seconds == pytest.approx(0.005)
    assert prediction.period_seconds == pytest.approx(0.007)
    assert prediction.gap == pytest.approx(1 - 0.005 / 0.007)
    assert prediction.method.startswith("plan by hand")
    best, *_ = prediction.alternatives
    assert best.period_seconds == pytest.approx(0.005)
    assert "this one 7 ms: gains 40" in best.why
    assert prediction.why_no_more_machines == ""


def test_replicas_share_computing_and_links_by_their_schedule():
    profile = chain_profile({A: [0.001, 0.008], B: [0.001, 0.012], C: [0.001, 0.024]}, **FAST)
    problem = chain_problem(profile, replicas=True)
    stages = (Stage((A,), ("layer_0",)), Stage((B, C), ("layer_1",), (2 / 3, 1 / 3)))
    prediction = predicted(problem, profile, stages)
    assert prediction.period_seconds == pytest.approx(0.008)
    _, second, third = prediction.machines
    assert second.compute_seconds == pytest.approx(0.008)
    assert second.alone_seconds == third.alone_seconds == pytest.approx(0.008)
    assert second.receive_seconds == pytest.approx(1e-6 * 2 / 3)
    assert third.send_seconds == pytest.approx(1e-6 / 3)
    links = {(link.source, link.destination): link for link in prediction.links}
    assert links[A, C].bytes == pytest.approx(1000 / 3)
    assert links[A, C].seconds == pytest.approx(1e-4 + 1e-6)  # a micro-batch is not divided among replicas
    assert links[C, "client"].stream_seconds == pytest.approx(1e-6 / 3)


def test_replicas_that_never_meet_have_no_link():
    seconds = {name: [0.001, 0.008] for name in (A, B, C, "machine-d")}
    profile = chain_profile(seconds, **FAST)
    problem = chain_problem(profile, replicas=True)
    halves = (0.5, 0.5)
    stages = (Stage((A, B), ("layer_0",), halves), Stage((C, "machine-d"), ("layer_1",), halves))
    prediction = predicted(problem, profile, stages)
    between = {
        (link.source, link.destination): link.bytes
        for link in prediction.links
        if "client" not in (link.source, link.destination)
    }
    assert between == {(A, C): 500, (B, "machine-d"): 500}


def test_what_was_estimated_is_told():
    profile = chain_profile({A: [0.001, 0.003]})
    times = {"layer_0": PieceTime(0.001, 0.001, "estimated"), "layer_1": PieceTime(0.003, 0.003, "measured")}
    profile = dataclasses.replace(profile, machines=(dataclasses.replace(profile.machines[0], pieces=times),))
    problem = chain_problem(profile)
    assert predicted(problem, profile).machines[0].estimated_share == pytest.approx(0.25)


def baselines(profile: ClusterProfile, **demands: object) -> dict[str, str]:
    """Names of the baselines, best first, and why they are not the plan."""
    problem = chain_problem(profile, **demands)
    return {baseline.name: baseline.why for baseline in predicted(problem, profile).baselines}


def test_baselines_are_possible_and_say_why_they_are_none():
    profile = chain_profile({A: [0.002] * 4, B: [0.004] * 4}, weight_bytes=1_000_000, **FAST)
    why = baselines(profile)[f"{ONE_MACHINE}, {B}"]
    assert why == "compute of machine-b limits it"
    tight = baselines(profile, memory={A: 3_500_000, B: 3_500_000})
    assert not any(name.startswith(ONE_MACHINE) for name in tight)
    assert list(baselines(profile, pin={"layer_0": B})) == [f"{ONE_MACHINE}, {B}"]
