"""Tables are whole in a terminal of 80 columns: no name of a usual length is broken, no number cut."""

import io

import pytest
from rich.console import Console

from rpc_runtime.program.events import StageStatistics
from tests.helpers.placement.predictions import machine_prediction, prediction
from tests.helpers.traces import CHAIN, A, B, events_of, plan_for, streamed
from tvm_split.deployment.deployment_report import report_of
from tvm_split.display.report import statistics_table
from tvm_split.display.view import Table, print_parts, show


def lines_of(table) -> list[str]:
    file = io.StringIO()
    print_parts([table], Console(file=file, width=80))
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("name", "shown"), [("stage_{}", "stage_{}"), ("stage_1_machine_a_{}", "stage_1_…_{}")])
def test_long_runs(name, shown):
    """Rows of stages, and of a machine's shards of stages."""
    seconds = {f"{activity}_seconds": 4321.5 for activity in ("compute", "wait", "receive", "send")}
    stages = [
        StageStatistics(name.format(index), "machine-a", 100, **seconds, bytes_sent=987_600_000) for index in (0, 1, 12)
    ]
    lines = lines_of(statistics_table(stages, "net"))
    assert [line.split()[:2] for line in lines if "stage_" in line] == [
        [shown.format(index), "machine-a"] for index in (0, 1, 12)
    ]
    assert all("987.6 MB" in line for line in lines if "stage_" in line)
    assert max(map(len, lines)) <= 80


def test_what_does_not_fit_goes_on_below_and_numbers_are_whole():
    name, numbers = "a-machine-with-a-very-long-name.in-the-lab.of-an-institute.example.org", ["12345678.9"] * 4
    lines = lines_of(Table("net", ("machine",), ("a", "b", "c", "d"), [(name, *numbers)]))
    rows = [line.split() for line in lines[next(index for index, line in enumerate(lines) if "─" in line) + 1 :]]
    assert rows[0][1:] == numbers
    assert "".join(row[0] for row in rows if row) == name
    assert max(map(len, lines)) <= 80


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
