"""Commands that show predictions and measurements use one word for one thing, in tables of 80 columns and in JSON."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.placement.bench_reports import report_of
from tests.helpers.placement.problems import GOOD

WIDTH = 80
OTHER_WORDS = {
    "period": r"interval|cycle_time|result every|every",
    "latency": r"one alone|flight|delay",
    "micro_batches_per_second": r"throughput|a second|samples_per_second|rate",
    "wait": r"waits|waits_for\w*|idle|waiting",
    "block": r"blocked|waits_for\w*|stall\w*",
    "compute": r"computes|computing|busy",
    "in_flight": r"under_way|under way",
    "limiting": r"limited_by|bottleneck",
    "predicted": r"expected|forecast",
    "machine": r"node|device_name|host",
    "level": r"verdict|severity|status",
    "remedy": r"advice|hint|fix",
}
"""The words of this project, with others for the same thing that no heading and no key may be."""
ALLOWED = {"bench": {"advice"}}
"""Advice of a report is about the plan, and no remedy of a finding."""
HEADING = re.compile(r"\S+(?: \S+)*")


@pytest.fixture(scope="module")
def commands(onnx_path, bundle, tmp_path_factory) -> dict[str, tuple[Any, ...]]:
    """Return the arguments with which each command shows a plan or a cluster."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "problem.json").write_text(GOOD)
    return {
        "plan": (onnx_path, "--estimate", "--details"),
        "solve": (folder / "problem.json",),
        "bench": (bundle, "--cluster", "in-process", "--rounds", "1", "--micro-batches", "3"),
        "profile": (onnx_path, "--rounds", "1"),
        "status": ("--cluster", "at:127.0.0.1:9", "--timeout", "1"),
        "doctor": ("--cluster", "at:127.0.0.1:9", "--timeout", "1"),
    }


NAMES = ("plan", "solve", "bench", "status", "doctor")
CODES = {"status": 1, "doctor": 1}
"""Exit codes: no worker answers."""


@pytest.fixture
def estimated_plan(invoke, onnx_path, tmp_path):
    invoke("plan", onnx_path, "--estimate", "--output", tmp_path / "plan.json")
    return tmp_path / "plan.json"


def keys(content: Any) -> Iterator[str]:
    """Yield the keys of JSON values, also of nested ones."""
    if isinstance(content, dict):
        yield from content
        content = list(content.values())
    for part in content if isinstance(content, list) else ():
        yield from keys(part)


def headings(text: str) -> Iterator[str]:
    """Yield the headings of all tables, which are the words above a rule."""
    lines = text.splitlines()
    for above, line in pairwise(lines):
        if line.strip() and set(line.strip()) == {"─"}:
            yield from HEADING.findall(above)


def tables(text: str) -> Iterator[str]:
    """Yield the lines of all tables: from above a rule to the next empty line."""
    inside, before = False, ""
    for line in text.splitlines():
        is_rule = bool(line.strip()) and set(line.strip()) == {"─"}
        if is_rule:
            yield before
        inside = is_rule or (inside and bool(line.strip()))
        if inside:
            yield line
        before = line


def require_words(command: str, names: set[str]) -> None:
    for word, others in OTHER_WORDS.items():
        wrong = {name for name in names if re.fullmatch(others, name)} - ALLOWED.get(command, set())
        assert not wrong, f"{command} says {sorted(wrong)}; this project says {word}"


def require_one_form(invoke, command: str, *arguments: Any) -> None:
    code = CODES.get(command, 0)
    text = invoke(command, *arguments, code=code).stdout
    content = json.loads(invoke(command, *arguments, "--json", code=code).stdout)
    found = {heading.removesuffix(", ms") for heading in headings(text)}
    assert found, "no table"
    require_words(command, found | set(keys(content)))
    assert max(map(len, tables(text))) <= WIDTH


@pytest.mark.parametrize("command", [*NAMES, pytest.param("profile", marks=pytest.mark.slow)])
def test_one_word_for_one_thing(invoke, commands, command):
    require_one_form(invoke, command, *commands[command])


def test_one_word_for_one_thing_of_plans_that_are_simulated_and_planned_again(
    invoke, onnx_path, estimated_plan, tmp_path
):
    require_one_form(invoke, "simulate", estimated_plan)
    report = tmp_path / "report.json"
    report.write_text(json.dumps(report_of(json.loads(estimated_plan.read_text()), {"machine-a": 1.0})))
    require_one_form(invoke, "replan", onnx_path, "--estimate", "--plan", estimated_plan, "--measured", report)


@pytest.mark.parametrize(
    ("command", "columns"),
    [("plan", ["predicted"]), ("solve", ["predicted"]), ("bench", ["predicted", "measured", "ratio"])],
)
def test_predictions_and_measurements_are_in_one_table(invoke, commands, command, columns):
    lines = invoke(command, *commands[command]).stdout.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.split()[:2] == ["period,", "ms"]]
    assert lines[place - 2].split() == columns
    assert lines[place + 1].split()[:2] == ["latency,", "ms"]
    assert lines[place + 2].split()[0] == "micro-batches/s"
