"""The harness on a toy case: turns, ratios within rounds, limits, failures, and sides in their own processes."""

import io
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts import bench, cases, harness
from scripts.harness import BEST, Case, Limit, MakeSides, Options, Ratio, Report, Setup, Side, run
from scripts.processes import Figures, Prepared


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait between measurements: these are not of this machine."""
    monkeypatch.setattr(harness, "PAUSE_SECONDS", 0.0)


def measured(case: Case, **options: Any) -> Report:
    return run("toy", case, Options(**options), Console(file=io.StringIO()))


def counting(calls: list[str], name: str, seconds: Sequence[float]) -> Side:
    values = itertools.cycle(seconds)

    def measure() -> Figures:
        calls.append(name)
        return {"seconds": next(values)}

    return Side(name, measure)


def toy(subjects: Mapping[str, MakeSides], **case: Any) -> Case:
    return Case(subjects, **case)


def test_sides_are_measured_in_turns_and_ratios_taken_within_rounds() -> None:
    calls: list[str] = []
    # The machine becomes ten times slower after the first round; every ratio within a round is 2.
    sides = [counting(calls, "slow", [2, 20, 20]), counting(calls, "quick", [1, 10, 10])]
    report = measured(toy({"one": lambda setup: sides}, rounds=3, ratios=(Ratio("seconds", "slow", "quick"),)))
    assert calls == ["slow", "quick", "quick", "slow", "slow", "quick"]
    assert report.subjects["one"]["ratios"] == {"seconds: slow / quick": 2.0}
    assert report.subjects["one"]["medians"] == {"slow": {"seconds": 20}, "quick": {"seconds": 10}}


@pytest.mark.parametrize(
    ("rounds", "expected"), [(3, (1, 3)), (8, (1, 8)), (11, (2, 10)), (20, (6, 15)), (25, (8, 18))]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(rounds: int, expected: tuple[int, int]) -> None:
    """Published tables have the ranks of these two values, of so many, for 95%."""
    sides = [counting([], "slow", range(rounds, 0, -1)), counting([], "quick", [1])]
    report = measured(toy({"one": lambda setup: sides}, rounds=rounds, ratios=(Ratio("seconds", "slow", "quick"),)))
    assert report.subjects["one"]["intervals"] == {"seconds: slow / quick": expected}


@pytest.mark.parametrize(
    ("limit", "texts"),
    [
        (Limit("seconds", 2.0, "slow", "quick"), []),
        (Limit("seconds", 1.9, "slow", "quick"), ["one: seconds of slow / quick is 2, over 1.9"]),
        (Limit("seconds", 1.9, "slow", BEST), ["one: seconds of slow / quick is 2, over 1.9"]),
        (Limit("seconds", 1.9, "quick", BEST), []),
        (Limit("seconds", 1.9), ["one: seconds of slow is 2, over 1.9"]),
        (Limit("seconds", 0.0, "absent"), []),
        (Limit("bytes", 0.0), []),
    ],
)
def test_what_passes_a_limit_is_reported(limit: Limit, texts: list[str]) -> None:
    sides = [counting([], "slow", [2]), counting([], "quick", [1])]
    assert measured(toy({"one": lambda setup: sides}, limits=(limit,)), rounds=2).over_limit == texts


def fails(setup: Setup) -> Sequence[Side]:
    raise ValueError("no such machine")


def test_a_subject_that_fails_does_not_stop_the_others() -> None:
    report = measured(toy({"first": fails, "second": lambda setup: [counting([], "side", [1])]}))
    assert report.failed == {"first": "ValueError: no such machine"}
    assert list(report.subjects) == ["second"]


def test_no_subject_is_begun_after_the_time_limit() -> None:
    report = measured(toy({"first": fails}), time_limit_seconds=0.0)
    assert (report.not_reached, report.failed) == (["first"], {})


def test_subjects_are_chosen_by_words_in_their_names() -> None:
    subjects = {name: (lambda setup: [counting([], "side", [1])]) for name in ("resnet, 1", "resnet, 2", "vgg, 1")}
    assert list(measured(toy(subjects), only=("net, 2", "vgg")).subjects) == ["resnet, 2", "vgg, 1"]


@contextmanager
def adds(first: float, loud: bool = False, ends: bool = False) -> Iterator[Prepared]:
    """A side for the processes of these tests."""

    def measure(second: float = 0.0) -> Figures:
        if loud:
            print("libraries print")
        if ends:
            os._exit(3)
        return {"sum_seconds": first + second}

    if math.isnan(first):
        raise ValueError("not a number")
    yield Prepared(measure, {"first": first})


def test_sides_run_in_processes_of_any_checkout() -> None:
    def sides(setup: Setup) -> Sequence[Side]:
        return [setup.side("adds", adds, checkout, first=2.0, loud=True) for checkout in setup.checkouts]

    report = measured(toy({"one": sides}, rounds=1), also=(sys.executable,))
    (name, other_name), content = report.subjects["one"]["medians"], report.subjects["one"]
    assert content["medians"] == {name: {"sum_seconds": 2.0}, other_name: {"sum_seconds": 2.0}}
    assert content["facts"] == {name: {"first": 2.0}, other_name: {"first": 2.0}}
    assert content["ratios"] == {f"sum_seconds: {name} / {other_name}": 1.0}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"first": math.nan}, "ValueError: not a number"), ({"first": 1.0, "ends": True}, "ended with exit code 3")],
)
def test_a_process_that_fails_is_a_failure_of_its_subject(arguments: dict[str, Any], text: str) -> None:
    report = measured(toy({"one": lambda setup: [setup.side("adds", adds, **arguments)]}))
    assert text in report.failed["one"]


def test_the_command_lists_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cases.CASES)
    assert all(cases.case_named(name).subjects for name in cases.CASES)


def test_the_command_writes_json_and_fails_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = toy({"one": lambda setup: [counting([], "side", [1])]}, limits=(Limit("seconds", 0.5),))
    monkeypatch.setattr(bench, "case_named", lambda name: case)
    path = tmp_path / "report.json"
    assert bench.main(["kernels", "--rounds", "2", "--json", str(path)]) == 0
    assert bench.main(["kernels", "--rounds", "2", "--check"]) == 1
    report = json.loads(path.read_text())
    assert report["subjects"]["one"]["rounds"] == {"side": [{"seconds": 1}, {"seconds": 1}]}
    assert report["over_limit"] == ["one: seconds of side is 1, over 0.5"]
