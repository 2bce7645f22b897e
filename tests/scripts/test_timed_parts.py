"""Runs that end within their time, whatever their parts do."""

from __future__ import annotations

import ctypes
import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts import timed_parts
from scripts.timed_parts import TimedParts

ROOT = Path(__file__).parents[2]


def console() -> Console:
    return Console(file=io.StringIO())


def wait_in_vain() -> dict[str, Any]:
    threading.Event().wait(60)
    return {}


def test_a_part_that_takes_too_long_ends_and_others_go_on() -> None:
    kept: list[int] = []
    found: list[dict[str, Any]] = []
    timed = TimedParts(0.5, console(), lambda: kept.append(len(found)))
    timed.run("networks", "quick", found, lambda: {"n": 1})
    timed.run("networks", "slow", found, wait_in_vain)
    timed.run("networks", "late", found, lambda: {"n": 2})
    timed.run("torch.compile", "still", found, lambda: {"n": 3})
    assert found == [{"n": 1}, {"n": 3}]
    assert (timed.not_reached, timed.failed) == (["slow", "late"], {})
    assert kept == [1, 1, 2]


def test_what_a_part_makes_of_being_ended_is_no_failure() -> None:
    def through_a_compiler() -> dict[str, Any]:
        try:
            wait_in_vain()
        except BaseException as error:
            raise RuntimeError("a callback failed") from error
        return {}

    timed = TimedParts(0.2, console(), lambda: None)
    timed.run("networks", "slow", [], through_a_compiler)
    assert (timed.not_reached, timed.failed) == (["slow"], {})


def test_one_that_fails_is_no_reason_to_end() -> None:
    timed = TimedParts(100.0, console(), lambda: None)
    found: list[dict[str, Any]] = []
    for error in (RuntimeError("first"), ValueError("second")):

        def part(error: Exception = error) -> dict[str, Any]:
            raise error

        timed.run("networks", str(error), found, part)
    timed.run("networks", "third", found, lambda: {"n": 3})
    assert timed.failed == {"first": "RuntimeError: first", "second": "ValueError: second"}
    assert (found, timed.not_reached) == ([{"n": 3}], [])


@pytest.mark.parametrize("way", ["deaf", "holding"])
def test_a_part_that_does_not_end_is_left_behind_with_what_others_found(tmp_path: Path, way: str) -> None:
    """One that hears nothing, and one whose code lets no other thread of Python run."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.scripts.test_timed_parts", way, str(tmp_path / "kept.json")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["found"] == [{"n": 1}]
    if way == "deaf":
        assert kept["not_reached"] == ["stuck"]
        assert "stuck does not end within its time" in done.stdout


def _stay(way: str) -> dict[str, Any]:
    if way == "holding":
        # As a library that computes without letting the interpreter go: it waits for a lock that it has.
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    while True:
        try:
            time.sleep(100)
        except BaseException:
            continue


def _main(way: str, path: Path) -> None:
    timed_parts.GRACE_SECONDS = 0.3
    found: list[dict[str, Any]] = []

    def keep() -> None:
        path.write_text(json.dumps({"found": found, "not_reached": timed.not_reached}))

    timed = TimedParts(1.0, Console(), keep)
    timed.run("networks", "quick", found, lambda: {"n": 1})
    timed.run("networks", "stuck", found, lambda: _stay(way))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
