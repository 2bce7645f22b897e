"""Comparisons of predictions with traces written by hand, and report files that are read for replanning."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import StageSpec
from tests.helpers.mutations import WRONG_FILES
from tests.helpers.placement.predictions import machine_prediction, prediction
from tests.helpers.traces import CHAIN, LINKS, MILLISECOND, A, B, C, events_of, plan_for, stage, streamed, tensor
from tvm_split.deployment.deployment_report import DeploymentReport, read_computing, read_measured, report_of
from tvm_split.deployment.run_times import MeasuredRuns, Window
from tvm_split.errors import PlanError
from tvm_split.placement.prediction import LinkPrediction
from tvm_split.placement.problem import CoresLoad
from tvm_split.placement.profile import Corrections

SLOW = dataclasses.replace(streamed(), streams=(Window(0, 240 * MILLISECOND, 20),))
"""A result every 12 ms; 10 ms are predicted."""
TWICE = dataclasses.replace(streamed(), streams=(Window(0, 400 * MILLISECOND, 20),))
"""A result every 20 ms."""
FORKED = Program(
    (tensor("x"),),
    (tensor("w"),),
    (stage(0, A, ("x",), ("y", "v")), stage(1, B, ("y",), ("z",)), stage(2, C, ("v", "z"), ("w",))),
)
"""A sends to B and C, and C receives from both."""


def compared(
    compute: Sequence[float] = (10, 6),
    wire: float = 2,
    measured: MeasuredRuns | None = None,
    *,
    first: float = 0.010,
    links: Sequence[LinkPrediction] = (),
    prediction_changes: dict | None = None,
    **of_first: float,
) -> DeploymentReport:
    """Report a chain on two machines: ``compute`` and ``wire`` ms were measured, ``first`` and 0.006 s predicted."""
    machines = (machine_prediction(A, first, **of_first), machine_prediction(B, 0.006))
    changes = {"latency_seconds": 0.016, **(prediction_changes or {})}
    expected = dataclasses.replace(prediction(machines, tuple(links)), **changes)
    return report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, compute, wire), measured or streamed())


def unpredicted(program: Program, compute: Sequence[float] = (10, 6), measured: MeasuredRuns | None = None):
    """Report a program without a prediction; a replica has events only for its own micro-batches."""
    own = {(spec.machine, spec.name): spec.micro_batches for spec in program.stages}
    events = events_of(program, compute, count=21)
    own_events = [event for event in events if event.sequence in own[event.machine, event.stage]]
    return report_of(plan_for(program), program, own_events, measured or streamed(21))


def test_every_number_has_its_place():
    report = compared(links=LINKS)
    first, second = report.machines
    assert (first.machine, first.stages, first.micro_batches) == (A, ("stage_0",), 20)
    ratios = [first.compute.ratio, first.receive.ratio, first.send.ratio, report.period.ratio]
    between = report.links[1]
    assert [*ratios, between.bytes.ratio, between.seconds.ratio] == pytest.approx([1, 2, 1, 1, 1, 1])
    assert (second.compute.measured, report.latency.measured) == (pytest.approx(0.006), pytest.approx(0.016))
    assert [(link.source, link.destination) for link in report.links] == [("client", A), (A, B), (B, "client")]
    assert report.links[0].seconds.predicted is None
    json.dumps(report.to_dict())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "compute of machine-a, which takes 10 ms of the 10 ms"),
        ({"compute": (6, 9)}, "compute of machine-b, which takes 9 ms"),
        ({"compute": (3, 4), "wire": 9}, "receiving on machine-a from client, which takes 9 ms"),
        ({"compute": (1, 2)}, "no single part: compute of machine-b, the longest, takes 2 ms"),
        ({"measured": MeasuredRuns((), (), 0)}, ""),
    ],
)
def test_what_the_measured_stream_waits_for(arguments, words):
    report = compared(**arguments)
    assert report.measured_limiting.startswith(words)
    assert report.to_dict()["measured_limiting"] == report.measured_limiting


def test_waiting_for_a_core_is_as_predicted_where_they_are_too_few():
    assert compared(first=0.005).machines[0].compute.ratio == pytest.approx(2.0)
    shared = {"shared_cores": (CoresLoad((A, B, "client"), 1, 0.011, 2),)}
    compute = compared(first=0.005, prediction_changes=shared).machines[0].compute
    assert (compute.predicted_least, compute.ratio) == (pytest.approx(0.005), pytest.approx(1.0))


def test_without_a_prediction():
    report = unpredicted(CHAIN, measured=streamed())
    compute = report.machines[0].compute
    assert (report.advice, compute.predicted, compute.ratio) == ((), None, None)
    for measured, seconds in ((compute, 0.010), (report.period, 0.010), (report.latency, 0.016)):
        assert (measured.predicted, measured.measured, measured.ratio) == (None, pytest.approx(seconds), None)
    assert all(link.bytes.predicted is None and link.seconds.predicted is None for link in report.links)


def test_only_what_began_in_a_window_counts():
    windows = tuple(Window(start * MILLISECOND, (start + 5) * MILLISECOND, 1) for start in (50, 20, 170))
    report = unpredicted(CHAIN, measured=MeasuredRuns((), windows, 3))
    assert [machine.micro_batches for machine in report.machines] == [3, 3]
    before = MeasuredRuns((), (Window(-5, -1, 1),), 1)
    assert unpredicted(CHAIN, measured=before).machines[0].compute.measured is None
    nothing = unpredicted(CHAIN, measured=MeasuredRuns((), (), 0))
    assert [machine.micro_batches for machine in nothing.machines] == [0, 0]
    assert nothing.links[1].bytes.measured is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ()),
        ({"compute": (11, 6)}, ()),
        ({"compute": (13, 6)}, ("machine-a computes 13 ms and not 10 ms (1.30 times as long)", "machine-a again")),
        ({"compute": (10, 3)}, ("machine-b computes 3 ms", "more layers")),
        ({"wire": 4, "measured": SLOW}, ("machine-a → machine-b takes 4 ms", "Probe it again", "--refresh")),
        ({"wire": 1.2, "links": [LinkPrediction(A, B, 1000.0, 0.004, 0.003)]}, ("takes 1.2 ms", "can carry more")),
        ({"wire": 5}, ()),  # it holds nothing up
        ({"first": 0.005, "estimated_share": 0.4}, ("40% of its prediction was estimated",)),
        ({"measured": SLOW}, ("a result came every 12 ms", "the inputs")),
        ({"prediction_changes": {"latency_seconds": 0.008}}, ("a single run takes 16 ms",)),
        (
            {"compute": (20, 6), "measured": TWICE},
            ("every 20 ms and not 10 ms (2.00 times as long): it is limited by compute of machine-a", "computes 20 ms"),
        ),
        (
            {"compute": (20, 6), "measured": TWICE, "prediction_changes": {"latency_seconds": 0.030}},
            ("every 20 ms", "a single run takes 16 ms and not 30 ms (0.53", "they take 26 ms together"),
        ),
        (
            {"compute": (7, 3), "prediction_changes": {"latency_seconds": 0.030}},
            ("a single run takes 16 ms and not 30 ms", "computing takes 6 ms less than predicted"),
        ),
    ],
)
def test_advice(arguments, words):
    text = "\n".join(compared(**{"links": LINKS, **arguments}).advice)
    assert all(word in text for word in words), text
    assert bool(text) == bool(words)


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        (A, "sending on machine-a to machine-b and machine-c takes 5 ms and not 2"),
        (C, "receiving on machine-c from machine-a and machine-b takes 5 ms and not 2"),
    ],
)
def test_links_that_are_slow_only_together_are_named(slow, words):
    """A link takes 2.5 ms of a period of 12 ms, which is too short to say something about it."""
    machines = [
        machine_prediction(name, receive_seconds=received / 2 if name == slow else received, send_seconds=sent)
        for name, received, sent in (
            (A, 0.0025, 0.0025 if slow == A else 0.005),
            (B, 0.0025, 0.0025),
            (C, 0.005, 0.0025),
        )
    ]
    report = report_of(plan_for(FORKED, prediction(tuple(machines))), FORKED, events_of(FORKED, (10,) * 3, 2.5), SLOW)
    assert report.advice[0].startswith(words)
    assert not any("no machine and no link" in text for text in report.advice)


def test_a_machine_with_two_stages_is_their_sum():
    stages = (*CHAIN.stages, stage(2, A, ("z",), ("w",)))
    report = unpredicted(Program((tensor("x"),), (tensor("w"),), stages), (3, 6, 4))
    assert report.machines[0].stages == ("stage_0", "stage_2")
    assert report.machines[0].compute.measured == pytest.approx(0.007)
    links = {(link.source, link.destination): link.seconds.measured for link in report.links}
    assert (links[A, B], links[B, A]) == (pytest.approx(0.002), pytest.approx(0.002))


def test_a_machine_with_several_links_has_the_time_of_each():
    report = unpredicted(FORKED, (3, 6, 4))
    measured = {(link.source, link.destination): (link.bytes.measured, link.seconds.measured) for link in report.links}
    # A sends to B and C, C receives from A and B.
    assert [measured[ends] for ends in ((A, B), (A, C), (B, C))] == [(1000, pytest.approx(0.002))] * 3


def replicated(first: StageSpec, *schedule: int) -> Program:
    """A chain whose second stage has replicas on B and C."""
    second = stage(1, B, ("y",), ("z",))
    replicas = tuple(
        dataclasses.replace(second, machine=machine, replica=replica, replica_schedule=schedule)
        for replica, machine in enumerate((B, C))
    )
    return Program((tensor("x"),), (tensor("z"),), (first, *replicas))


def test_replicas_are_measured_by_their_share_of_the_stream():
    report = unpredicted(replicated(stage(0, A, ("x",), ("y",)), 0, 1, 0), (3, 6, 12))
    first, second, third = report.machines
    assert (first.shares, second.stages) == ((1.0,), ("stage_1",))
    assert (*second.shares, *third.shares) == pytest.approx((2 / 3, 1 / 3))
    assert (second.micro_batches, third.micro_batches) == (14, 7)
    measured = [machine.compute.measured for machine in report.machines]
    assert measured == pytest.approx([0.003, 0.004, 0.004])
    assert third.receive.measured == pytest.approx(0.002 / 3)
    between = {(link.source, link.destination): link for link in report.links}
    assert list(between) == [("client", A), (A, B), (A, C), (B, "client"), (C, "client")]
    for end, share in ((B, 2 / 3), (C, 1 / 3)):
        assert between[A, end].bytes.measured == pytest.approx(1000 * share)
        assert between[A, end].seconds.measured == pytest.approx(0.002 * share)


@pytest.mark.parametrize(
    ("first", "transfer", "milliseconds", "ratio"),
    [
        *((0.010, 0.005, *pair) for pair in ((4, 0.8), (5, 1.0), (8, 1.0), (10, 1.0), (12, 1.2))),
        *((0.011, 0.010, *pair) for pair in ((0.5, 0.5), (2, None), (10, None), (22, 2.0))),  # too wide a range
    ],
)
def test_what_serialising_takes_may_fall_into_computing_or_not(first, transfer, milliseconds, ratio):
    """The prediction is a range that the measurement does not change."""
    report = compared((milliseconds, 6), first=first, transfer_seconds=transfer)
    compute = report.machines[0].compute
    assert (compute.predicted_least, compute.predicted) == (pytest.approx(first - transfer), first)
    assert compute.ratio == (ratio if ratio is None else pytest.approx(ratio))
    assert compute.inconclusive == (ratio is None)
    assert report.machines[1].compute.predicted_least is None
    assert any("(2.00 times the nearer end)" in text for text in report.advice) == (ratio == 2.0)


@pytest.mark.parametrize("measured", [streamed(), SLOW], ids=["as predicted", "slower"])
@pytest.mark.parametrize(("predicted", "wire"), [(0.57e-9, 0.05), (1e-5, 0.9), (1e-5, 2)])
def test_short_times_on_the_wire_are_no_reason_to_probe_again(predicted, wire, measured):
    """Such times are those of threads that wake up: less than a millisecond, or a small share of the period."""
    of_first = {"receive_seconds": predicted, "send_seconds": predicted}
    links = [LinkPrediction(A, B, 1000.0, predicted, predicted)]
    report = compared(wire=wire, measured=measured, links=links, **of_first)
    assert report.links[1].seconds.ratio > 10
    assert not any("Probe" in text for text in report.advice)
    assert bool(report.advice) == (measured is SLOW)  # about the whole deployment


CORRECTIONS = Corrections(((A, 1.5), ("machine-z", 3.0)), (("machine-z", A, 1e6),))


@pytest.fixture
def content():
    changes = {"corrections": CORRECTIONS}
    return compared(wire=5, measured=SLOW, first=0.005, links=LINKS, prediction_changes=changes).to_dict()


@pytest.fixture
def path(content, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**content, "rounds": 5}))
    return path


def test_a_report(path):
    measured = read_measured(path, "net")
    assert measured.compute_ratios == {A: pytest.approx(2.0), B: pytest.approx(1.0)}
    assert measured.link_speeds == {(A, B): pytest.approx(2e5)}
    assert (measured.earlier, measured.profiled_at) == (CORRECTIONS, 1_000_000.0)
    assert read_computing(path, "net") == {A: pytest.approx(0.010), B: pytest.approx(0.006)}


def test_what_was_not_measured_is_left_out_and_what_lies_in_a_wide_range_corrects_nothing(path, content):
    content["links"][1]["seconds"]["measured"] = None
    for changes, ratios, computing in (
        ({"predicted": 0.011, "predicted_least": 0.001}, {A: 1.0, B: pytest.approx(1.0)}, [A, B]),
        ({"measured": None, "predicted_least": None}, {B: pytest.approx(1.0)}, [B]),
    ):
        content["machines"][0]["compute_seconds"].update(changes)
        path.write_text(json.dumps(content))
        assert read_measured(path, "net").compute_ratios == ratios
        assert read_measured(path, "net").link_speeds == {}
        assert list(read_computing(path, "net")) == computing


@pytest.mark.parametrize(
    ("link", "wire", "measured"),
    [
        (LinkPrediction(A, B, 40.0, 0.002, 1e-7), 2, SLOW),  # 40 bytes take as long as usual
        (LinkPrediction(A, B, 40.0, 1e-4, 1e-7), 0.9, SLOW),  # as long as threads take to wake up
        (LinkPrediction(A, B, 1000.0, 0.003, 0.002), 5, streamed()),  # no result is delayed by it
    ],
)
def test_a_link_that_does_what_it_was_taken_for_keeps_its_speed(path, link, wire, measured):
    path.write_text(json.dumps(compared(wire=wire, measured=measured, links=[link]).to_dict()))
    assert read_measured(path, "net").link_speeds == {}


def test_files_that_say_nothing(path, content, tmp_path):
    with pytest.raises(PlanError, match=r"absent\.json: No such file"):
        read_measured(tmp_path / "absent.json", "net")
    with pytest.raises(PlanError, match="is of model 'net', the model is 'other'"):
        read_measured(path, "other")
    path.write_text(json.dumps(unpredicted(CHAIN).to_dict()))
    with pytest.raises(PlanError, match="nothing to compare"):
        read_measured(path, "net")
    path.write_text(json.dumps({**content, "moved": "since 12:00:00 stages are elsewhere"}))
    for read in (read_measured, read_computing):
        with pytest.raises(PlanError, match=r"says nothing about its plan.*since 12:00:00"):
            read(path, "net")
    content["machines"][1]["compute_seconds"]["measured"] = -0.01
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"machines\.1\.compute_seconds\.measured: .* greater than or equal to 0"):
        read_computing(path, "net")
    for text in (*WRONG_FILES, b'{"model": "net"}', json.dumps({**content, "machines": 3}).encode()):
        path.write_bytes(text)
        with pytest.raises(PlanError, match="not a report of `tvm-split bench --json`"):
            read_measured(path, "net")
