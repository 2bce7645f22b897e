"""A deployment's report as text."""

import io

import pytest
from rich.console import Console

from tests.helpers.planner.predictions import machine_prediction, prediction
from tests.helpers.traces import CHAIN, A, B, events_of, plan_for, streamed
from tvm_split.deployment.deployment_report import report_of
from tvm_split.display.view import show


@pytest.mark.parametrize(("seconds", "is_red"), [(6, False), (12, True)])
def test_what_differs_from_its_prediction_is_red(seconds, is_red):
    expected = prediction((machine_prediction(A, 0.010), machine_prediction(B, 0.006)))
    file = io.StringIO()
    report = report_of(plan_for(CHAIN, expected), CHAIN, events_of(CHAIN, (10, seconds)), streamed())
    show(report, Console(file=file, width=80, force_terminal=True, color_system="standard"))
    text = file.getvalue()
    assert ("\x1b[31m" in text) == is_red
    assert "machine-a → machine-b" in text
    plain = io.StringIO()
    show(report, Console(file=plain, width=80))
    assert max(map(len, plain.getvalue().splitlines())) <= 80
