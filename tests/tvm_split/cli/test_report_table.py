"""A deployment's report as text."""

import io

import pytest
from rich.console import Console

from tests.helpers.planner.predictions import machine_prediction, prediction
from tests.helpers.traces import CHAIN, LINKS, A, B, events_of, plan_for, streamed
from tvm_split.cli.report_table import print_report, summary
from tvm_split.deployment.deployment_report import report_of
from tvm_split.deployment.run_times import MeasuredRuns
from tvm_split.planner.prediction import LinkPrediction


def report(compute=(10, 6), predicted=True):
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)), LINKS) if predicted else None
    return report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, compute), streamed())


def test_as_predicted():
    file = io.StringIO()
    print_report(report(), Console(file=file, width=80))
    text = file.getvalue()
    for words in ("machine-a (stage_0)", "machine-a → machine-b", "1.0 kB", "100.0 micro-batches a second", "15 %"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_parts_is_red_and_explained():
    file = io.StringIO()
    print_report(report((10, 12)), Console(file=file, width=80, force_terminal=True, color_system="standard"))
    text = file.getvalue()
    assert "\x1b[31m" in text
    assert "2.00" in text
    assert "Profile machine-b again" in text


@pytest.mark.parametrize(("predicted", "words"), [(True, "Nothing that matters"), (False, "no prediction")])
def test_summary(predicted, words):
    assert words in "\n".join(summary(report(predicted=predicted)))


def test_a_range_and_times_that_say_nothing_of_a_link():
    first = machine_prediction(A, 0.01, transfer_seconds=0.0015, receive_seconds=1e-9, send_seconds=1e-9)
    links = (LinkPrediction(A, B, 1000.0, 1e-9, 1e-9),)
    expected = prediction((first, machine_prediction(B, 0.006)), links)
    file = io.StringIO()
    found = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, (9, 6), 0.5), streamed())
    print_report(found, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert next(line for line in lines if "compute" in line).split()[-5:] == ["8.500", "to", "10.000", "9.000", "1.00"]
    assert [line.split()[-1] for line in lines if "receive" in line or "send" in line or "→" in line] == ["–"] * 7
    assert any("nearer end" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_prediction_that_is_not_known_well_is_called_so():
    first = machine_prediction(A, 0.011, transfer_seconds=0.010)
    expected = prediction((first, machine_prediction(B, 0.006)))
    file = io.StringIO()
    found = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, (9, 6), 0.5), streamed())
    print_report(found, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert next(line for line in lines if "compute" in line).split()[-5:] == [
        "1.000",
        "to",
        "11.000",
        "9.000",
        "unsure",
    ]
    assert "Unsure: in its range, which is not known better than 3 to 1." in lines
    assert max(map(len, lines)) <= 80


def test_nothing_measured_yet():
    file = io.StringIO()
    nothing = report_of(plan_for(CHAIN), CHAIN, [], MeasuredRuns((), (), 0))
    print_report(nothing, Console(file=file, width=80))
    assert "over single runs: 0" in file.getvalue()
