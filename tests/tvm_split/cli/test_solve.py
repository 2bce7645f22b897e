from __future__ import annotations

import json

import pytest

from tests.helpers.planner.problems import GOOD
from tests.helpers.waiting import PATIENCE_SECONDS


@pytest.fixture
def problem_path(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(GOOD)
    return path


def test_the_planner_alone_as_a_process(start_process, problem_path):
    process = start_process("solve", problem_path, "--json")
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (0, "")
    solution = json.loads(output)
    assert [stage["machine"] for stage in solution["stages"]] == ["machine-0", "machine-1"]
    assert solution["predicted"]["period_seconds"] == 0.015


def test_a_problem_as_a_table(invoke, problem_path):
    text = invoke("solve", problem_path).stdout
    for expected in (
        "machine-0",
        "period 15 ms",
        "compute of machine-1",
        "no plan has a period below 15 ms",
        "instead",
    ):
        assert expected in text


def test_a_problem_without_a_plan_fails_with_the_reason(invoke, problem_path):
    problem_path.write_text(
        GOOD.replace('"name": "machine-1"', '"name": "machine-1", "memory_bytes": 1').replace("4e9", "5000")
    )
    result = invoke("solve", problem_path, code=1)
    assert "no plan fits the memory" in result.stderr
    assert result.stdout == ""


def test_a_wrong_file_is_wrong_use_and_names_the_line(invoke, problem_path):
    problem_path.write_text(GOOD.replace("0.015", "-1"))
    assert f"{problem_path}:6: " in invoke("solve", problem_path, code=2).stderr


@pytest.mark.parametrize("arguments", [["--stages", "2"], ["--objective", "latency"], ["--output", "plan.json"]])
def test_a_problem_says_everything_else_itself(invoke, problem_path, arguments):
    assert arguments[0] in invoke("solve", problem_path, *arguments, code=2).stderr
