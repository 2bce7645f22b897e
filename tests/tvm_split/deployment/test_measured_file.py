"""What `tvm-split bench --json` wrote, read for planning anew."""

import dataclasses
import json

import pytest

from tests.helpers.mutations import WRONG_FILES
from tests.helpers.planner.predictions import machine_prediction, prediction
from tests.helpers.traces import CHAIN, LINKS, MILLISECOND, A, B, events_of, plan_for, streamed
from tvm_split.deployment.deployment_report import report_of
from tvm_split.deployment.measured_file import read_computing, read_measured
from tvm_split.deployment.run_times import Window
from tvm_split.errors import PlanError
from tvm_split.planner.prediction import LinkPrediction
from tvm_split.planner.profile import Corrections

SLOW = dataclasses.replace(streamed(), streams=(Window(0, 240 * MILLISECOND, 20),))
"""A result every 12 ms, where 10 are predicted."""
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
    found = read_measured(path, "net")
    assert found.compute_ratios == {A: pytest.approx(2.0), B: pytest.approx(1.0)}
    assert found.link_speeds == {(A, B): pytest.approx(2e5)}
    assert found.earlier == CORRECTIONS
    assert found.profiled_at == 1_000_000.0


def test_what_lies_in_a_wide_range_corrects_nothing(path, content):
    content["machines"][0]["compute_seconds"].update(predicted=0.011, predicted_least=0.001)
    path.write_text(json.dumps(content))
    assert read_measured(path, "net").compute_ratios[A] == 1.0


def test_what_was_not_measured_is_left_out(path, content):
    content["machines"][0]["compute_seconds"]["measured"] = None
    content["links"][1]["seconds"]["measured"] = None
    path.write_text(json.dumps(content))
    found = read_measured(path, "net")
    assert list(found.compute_ratios) == [B]
    assert found.link_speeds == {}


@pytest.mark.parametrize(
    ("link", "wire", "measured"),
    [
        (LinkPrediction(A, B, 40.0, 0.002, 1e-7), 2, SLOW),  # 40 bytes take as long as ever
        (LinkPrediction(A, B, 40.0, 1e-4, 1e-7), 0.9, SLOW),  # as long as threads take to wake up
        (LinkPrediction(A, B, 1000.0, 0.003, 0.002), 5, streamed()),  # nothing is later for it
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
