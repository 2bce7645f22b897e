"""Comparisons of predictions with traces written by hand, and report files that are read for replanning."""

import dataclasses
import json

import pytest

from rpc_runtime.program.measurements import TraceEvent
from rpc_runtime.program.program import Program, StageSpec
from tests.helpers.mutations import WRONG_FILES
from tests.helpers.planner.predictions import machine_prediction, prediction
from tests.helpers.traces import CHAIN, LINKS, MILLISECOND, A, B, C, events_of, plan_for, stage, streamed, tensor
from tvm_split.deployment.deployment_report import read_computing, read_measured, report_of
from tvm_split.deployment.run_times import MeasuredRuns, Window
from tvm_split.errors import PlanError
from tvm_split.planner.prediction import LinkPrediction
from tvm_split.planner.problem import CoresLoad
from tvm_split.planner.profile import Corrections

SLOW = dataclasses.replace(streamed(), streams=(Window(0, 240 * MILLISECOND, 20),))
"""A result every 12 ms; 10 ms are predicted."""


def test_a_link_that_takes_longer_and_holds_nothing_up_is_no_reason_to_probe():
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)), LINKS)
    expected = dataclasses.replace(expected, latency_seconds=0.016)
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, wire=5), streamed())
    assert report.links[1].seconds.ratio > 1.5
    assert report.advice == ()


def test_every_number_has_its_place():
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)), LINKS)
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN), streamed())
    first, second = report.machines
    assert (first.machine, first.stages, first.micro_batches) == (A, ("stage_0",), 20)
    assert first.compute.ratio == pytest.approx(1.0)
    assert first.receive.ratio == pytest.approx(2.0)
    assert first.send.ratio == pytest.approx(1.0)
    assert second.compute.measured == pytest.approx(0.006)
    assert report.period.ratio == pytest.approx(1.0)
    assert report.latency.measured == pytest.approx(0.016)
    assert [(link.source, link.destination) for link in report.links] == [("client", A), (A, B), (B, "client")]
    between = report.links[1]
    assert between.bytes.ratio == pytest.approx(1.0)
    assert between.seconds.ratio == pytest.approx(1.0)
    assert report.links[0].seconds.predicted is None
    json.dumps(report.to_dict())


def test_waiting_for_a_core_is_as_predicted_where_they_are_too_few():
    expected = prediction((machine_prediction(A, 0.005), machine_prediction(B, 0.006)))
    apart = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN), streamed())
    assert apart.machines[0].compute.ratio == pytest.approx(2.0)
    crowded = dataclasses.replace(expected, shared_cores=(CoresLoad((A, B, "client"), 1, 0.011, 2),))
    report = report_of(plan_for(CHAIN, crowded), CHAIN, events_of(CHAIN), streamed())
    assert report.machines[0].compute.predicted_least == pytest.approx(0.005)
    assert report.machines[0].compute.ratio == pytest.approx(1.0)


def test_without_a_prediction():
    report = report_of(plan_for(CHAIN), CHAIN, events_of(CHAIN), streamed())
    assert report.advice == ()
    assert report.machines[0].compute.predicted is None
    assert report.machines[0].compute.measured == pytest.approx(0.010)
    assert report.machines[0].compute.ratio is None
    for whole, measured in ((report.period, 0.010), (report.latency, 0.016)):
        assert (whole.predicted, whole.measured, whole.ratio) == (None, pytest.approx(measured), None)
    assert all(link.bytes.predicted is None and link.seconds.predicted is None for link in report.links)


def test_only_what_began_in_a_window_counts():
    windows = tuple(Window(start * MILLISECOND, (start + 5) * MILLISECOND, 1) for start in (50, 20, 170))
    report = report_of(plan_for(CHAIN), CHAIN, events_of(CHAIN), MeasuredRuns((), windows, 3))
    assert [machine.micro_batches for machine in report.machines] == [3, 3]
    before = MeasuredRuns((), (Window(-5, -1, 1),), 1)
    assert report_of(plan_for(CHAIN), CHAIN, events_of(CHAIN), before).machines[0].compute.measured is None


def test_nothing_was_run():
    expected = prediction((machine_prediction(A), machine_prediction(B)), LINKS)
    report = report_of(plan_for(CHAIN, expected), CHAIN, [], MeasuredRuns((), (), 0))
    assert report.advice == ()
    assert [machine.micro_batches for machine in report.machines] == [0, 0]
    assert report.links[1].bytes.measured is None


@pytest.mark.parametrize(
    ("compute", "wire", "words"),
    [
        ((11, 6), 2, ()),
        ((13, 6), 2, ("machine-a computes 13 ms and not 10 ms (1.30 times as long)", "Profile machine-a again")),
        ((10, 3), 2, ("machine-b computes 3 ms", "more layers")),
        ((10, 6), 4, ("machine-a → machine-b takes 4 ms", "Probe it again", "--refresh")),
        ((10, 6), 1.2, ("machine-a → machine-b takes 1.2 ms", "can carry more")),
    ],
)
def test_advice(compute, wire, words):
    links = LINKS if wire > 1.2 else (LinkPrediction(A, B, 1000.0, 0.004, 0.003),)
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)), links)
    expected = dataclasses.replace(expected, latency_seconds=0.016)
    measured = streamed() if wire < 4 else SLOW
    text = "\n".join(report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, compute, wire), measured).advice)
    assert all(word in text for word in words), text
    assert bool(text) == bool(words)


def test_estimates_are_named():
    expected = prediction((machine_prediction(A, 0.005, estimated_share=0.4), machine_prediction(B, 0.006)))
    text = "\n".join(report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN), streamed()).advice)
    assert "40% of its prediction was estimated" in text


def test_when_only_the_whole_is_slower():
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)))
    expected = dataclasses.replace(expected, latency_seconds=0.008)
    slow = dataclasses.replace(streamed(), streams=(Window(0, 400 * MILLISECOND, 20),))
    (first, second) = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN), slow).advice
    assert "a result came every 20 ms" in first
    assert "the inputs" in first
    assert "a single run takes 16 ms" in second


def test_a_machine_with_two_stages_is_their_sum():
    stages = (*CHAIN.stages, stage(2, A, ("z",), ("w",)))
    program = Program((tensor("x"),), (tensor("w"),), stages)
    report = report_of(plan_for(program), program, events_of(program, (3, 6, 4)), streamed())
    assert report.machines[0].stages == ("stage_0", "stage_2")
    assert report.machines[0].compute.measured == pytest.approx(0.007)
    links = {(link.source, link.destination): link for link in report.links}
    assert links[A, B].seconds.measured == pytest.approx(0.002)
    assert links[B, A].seconds.measured == pytest.approx(0.002)


def test_time_that_may_be_of_two_links_is_of_none():
    stages = (
        stage(0, A, ("x",), ("y", "v")),
        stage(1, B, ("y",), ("z",)),
        stage(2, C, ("v", "z"), ("w",)),
    )
    program = Program((tensor("x"),), (tensor("w"),), stages)
    report = report_of(plan_for(program), program, events_of(program, (3, 6, 4)), streamed())
    seconds = {(link.source, link.destination): link.seconds.measured for link in report.links}
    assert seconds[A, C] is None  # A sends to B and C, C receives from A and B
    assert seconds[A, B] == pytest.approx(0.002)  # what B received
    assert seconds[B, C] == pytest.approx(0.002)  # what B sent


def taking_turns(first: StageSpec, *turns: int) -> Program:
    """A chain whose second stage has replicas on B and C."""
    second = stage(1, B, ("y",), ("z",))
    replicas = tuple(
        dataclasses.replace(second, machine=machine, replica=replica, turns=turns)
        for replica, machine in enumerate((B, C))
    )
    return Program((tensor("x"),), (tensor("z"),), (first, *replicas))


def turned(program: Program, compute, wire: float = 2) -> list[TraceEvent]:
    """The events of `events_of` that occur: a replica has events only in its own turns."""
    turns = {(spec.machine, spec.name): spec.own_turns for spec in program.stages}
    events = events_of(program, compute, wire, count=21)
    return [event for event in events if event.sequence in turns[event.machine, event.stage]]


def test_replicas_are_measured_by_their_share_of_the_stream():
    program = taking_turns(stage(0, A, ("x",), ("y",)), 0, 1, 0)
    links = (LinkPrediction(A, B, 1000 * 2 / 3, 0.003, 0.002 * 2 / 3), LinkPrediction(A, C, 1000 / 3, 0.003, 0.002 / 3))
    machines = (machine_prediction(A, 0.003), machine_prediction(B, 0.004), machine_prediction(C, 0.004))
    report = report_of(
        plan_for(program, prediction(machines, links)), program, turned(program, (3, 6, 12)), streamed(21)
    )
    first, second, third = report.machines
    assert (first.shares, second.stages) == ((1.0,), ("stage_1",))
    assert (second.shares, third.shares) == ((pytest.approx(2 / 3),), (pytest.approx(1 / 3),))
    assert (second.micro_batches, third.micro_batches) == (14, 7)
    for machine in report.machines:
        assert machine.compute.ratio == pytest.approx(1.0)
    assert third.receive.measured == pytest.approx(0.002 / 3)
    between = {(link.source, link.destination): link for link in report.links}
    assert list(between) == [("client", A), (A, B), (A, C), (B, "client"), (C, "client")]
    for end in (B, C):
        assert between[A, end].bytes.ratio == pytest.approx(1.0)
        assert between[A, end].seconds.ratio == pytest.approx(1.0)  # A sends each micro-batch to one of them
    assert report.to_dict()["machines"][2]["shares"] == [pytest.approx(1 / 3)]


@pytest.mark.parametrize(("milliseconds", "ratio"), [(4, 0.8), (5, 1.0), (8, 1.0), (10, 1.0), (12, 1.2)])
def test_what_serialising_takes_may_fall_into_computing_or_not(milliseconds, ratio):
    """The prediction is a range that the measurement does not change."""
    first = machine_prediction(A, 0.010, transfer_seconds=0.005)
    expected = prediction((first, machine_prediction(B, 0.006)))
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, (milliseconds, 6)), streamed())
    compute = report.machines[0].compute
    assert (compute.predicted_least, compute.predicted) == (pytest.approx(0.005), 0.010)
    assert compute.ratio == pytest.approx(ratio)
    assert report.machines[1].compute.predicted_least is None
    assert report.to_dict()["machines"][0]["compute_seconds"]["predicted"] == 0.010


@pytest.mark.parametrize(("milliseconds", "ratio"), [(0.5, 0.5), (2, None), (10, None), (22, 2.0)])
def test_in_a_range_of_eleven_to_one_is_no_ratio(milliseconds, ratio):
    first = machine_prediction(A, 0.011, transfer_seconds=0.010)
    expected = dataclasses.replace(prediction((first, machine_prediction(B, 0.006))), latency_seconds=0.016)
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, (milliseconds, 6)), streamed())
    compute = report.machines[0].compute
    assert compute.ratio == (ratio if ratio is None else pytest.approx(ratio))
    assert compute.inconclusive == (ratio is None)
    advice = "machine-a computes 22 ms and not 1 to 11 ms (2.00 times the nearer end)"
    assert any(advice in text for text in report.advice) == (milliseconds == 22)


@pytest.mark.parametrize("measured", [streamed(), SLOW], ids=["as predicted", "slower"])
@pytest.mark.parametrize(("predicted", "wire"), [(0.57e-9, 0.05), (1e-5, 0.9), (1e-5, 2)])
def test_short_times_on_the_wire_are_no_reason_to_probe_again(predicted, wire, measured):
    """Such times are those of threads that wake up: less than a millisecond, or a small share of the period."""
    machines = tuple(
        machine_prediction(name, seconds, receive_seconds=predicted, send_seconds=predicted)
        for name, seconds in ((A, 0.010), (B, 0.006))
    )
    links = (LinkPrediction(A, B, 1000.0, predicted, predicted),)
    expected = dataclasses.replace(prediction(machines, links), latency_seconds=0.016)
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, wire=wire), measured)
    assert report.links[1].seconds.ratio > 10
    assert not any("Probe" in text for text in report.advice)
    assert bool(report.advice) == (measured is SLOW)  # about the whole deployment


CORRECTIONS = Corrections(((A, 1.5), ("machine-z", 3.0)), (("machine-z", A, 1e6),))


@pytest.fixture
def content():
    expected = prediction((machine_prediction(A, 0.005), machine_prediction(B, 0.006)), LINKS)
    expected = dataclasses.replace(expected, corrections=CORRECTIONS)
    return report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, wire=5), SLOW).to_dict()


@pytest.fixture
def path(content, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**content, "rounds": 5}))
    return path


def test_a_report(path):
    measured = read_measured(path, "net")
    assert measured.compute_ratios == {A: pytest.approx(2.0), B: pytest.approx(1.0)}
    assert measured.link_speeds == {(A, B): pytest.approx(2e5)}
    assert measured.earlier == CORRECTIONS
    assert measured.profiled_at == 1_000_000.0


def test_what_lies_in_a_wide_range_corrects_nothing(path, content):
    content["machines"][0]["compute_seconds"].update(predicted=0.011, predicted_least=0.001)
    path.write_text(json.dumps(content))
    assert read_measured(path, "net").compute_ratios[A] == 1.0


def test_what_was_not_measured_is_left_out(path, content):
    content["machines"][0]["compute_seconds"]["measured"] = None
    content["links"][1]["seconds"]["measured"] = None
    path.write_text(json.dumps(content))
    measured = read_measured(path, "net")
    assert list(measured.compute_ratios) == [B]
    assert measured.link_speeds == {}


@pytest.mark.parametrize(
    ("link", "wire", "measured"),
    [
        (LinkPrediction(A, B, 40.0, 0.002, 1e-7), 2, SLOW),  # 40 bytes take as long as usual
        (LinkPrediction(A, B, 40.0, 1e-4, 1e-7), 0.9, SLOW),  # as long as threads take to wake up
        (LinkPrediction(A, B, 1000.0, 0.003, 0.002), 5, streamed()),  # no result is delayed by it
    ],
)
def test_a_link_that_does_what_it_was_taken_for_keeps_its_speed(tmp_path, link, wire, measured):
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)), (link,))
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, wire=wire), measured)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report.to_dict()))
    assert read_measured(path, "net").link_speeds == {}


def test_files_that_say_nothing(path, content, tmp_path):
    with pytest.raises(PlanError, match=r"absent\.json: No such file"):
        read_measured(tmp_path / "absent.json", "net")
    with pytest.raises(PlanError, match="is of model 'net', the model is 'other'"):
        read_measured(path, "other")
    for text in (*WRONG_FILES, b'{"model": "net"}', json.dumps({**content, "machines": 3}).encode()):
        path.write_bytes(text)
        with pytest.raises(PlanError, match="no report, which `tvm-split bench --json` writes"):
            read_measured(path, "net")
    unpredicted = report_of(plan_for(CHAIN), CHAIN, events_of(CHAIN), streamed()).to_dict()
    path.write_text(json.dumps(unpredicted))
    with pytest.raises(PlanError, match="nothing to compare"):
        read_measured(path, "net")


def test_seconds_that_cannot_be_are_refused_with_their_place(path, content):
    content["machines"][1]["compute_seconds"]["measured"] = -0.01
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"machines\.1\.compute_seconds\.measured: .* greater than or equal to 0"):
        read_computing(path, "net")


def test_what_machines_compute(path, content):
    assert read_computing(path, "net") == {A: pytest.approx(0.010), B: pytest.approx(0.006)}
    content["machines"][0]["compute_seconds"]["measured"] = None
    path.write_text(json.dumps(content))
    assert list(read_computing(path, "net")) == [B]
