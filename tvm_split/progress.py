"""Progress in steps, shown on stderr: a bar on a terminal, elsewhere a line every ten seconds.

The variable TVM_SPLIT_PROGRESS=0 turns both off.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

StepProgress = Callable[[str, int, int], None]
"""Callback with the current step, the number of steps done and of all steps; called from one thread at a time."""


class Steps:
    """Counts and reports steps; ``total`` may grow during the operation. Thread-safe."""

    def __init__(self, report: StepProgress | None) -> None:
        self._report = report or (lambda what, done, steps: None)
        self._lock = threading.Lock()
        self._begun = 0
        self.total = 0

    def begin(self, what: str) -> None:
        with self._lock:
            self._report(what, self._begun, max(self.total, self._begun + 1))
            self._begun += 1

    def done(self) -> None:
        self.total = max(self.total, self._begun)
        self._report("done", self.total, self.total)


STDERR = Console(stderr=True)
PROGRESS_VARIABLE = "TVM_SPLIT_PROGRESS"
SECONDS_BETWEEN_LINES = 10.0
MOST_DRAWN = 200

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def says_progress(what: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator for functions with ``on_progress``: if it is not given, the steps are shown."""

    def shown(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            if named.get("on_progress") is not None:
                return function(*arguments, **named)
            with step_progress(what) as report:
                changed: Any = {**named, "on_progress": report}
                return function(*arguments, **changed)

        return call

    return shown


@contextmanager
def step_progress(what: str) -> Iterator[StepProgress]:
    """Show counted steps; yields a function to call with the current step, the steps done and all steps."""
    with progress_bars(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bars:
        task = bars.add_task(what, total=None)

        def report(description: str, done: int, steps: int) -> None:
            if done % max(1, steps // MOST_DRAWN) == 0:  # limit the cost of drawing short steps
                bars.update(task, description=description, completed=done, total=steps)

        yield report


@contextmanager
def progress_bars(*columns: ProgressColumn) -> Iterator[Progress]:
    """Show one bar per task that is added to the yielded `Progress`; lines instead of bars without a terminal."""
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *columns,
        console=STDERR,
        transient=True,
        disable=not STDERR.is_terminal or os.environ.get(PROGRESS_VARIABLE) == "0",
    )
    ended = threading.Event()
    if not STDERR.is_terminal and os.environ.get(PROGRESS_VARIABLE) != "0":
        threading.Thread(target=_say_lines, args=(bars, ended), name="progress", daemon=True).start()
    try:
        with bars:
            yield bars
    finally:
        ended.set()


def _say_lines(bars: Progress, ended: threading.Event) -> None:
    begun = time.monotonic()
    while not ended.wait(SECONDS_BETWEEN_LINES):
        for task in bars.tasks:
            if not task.finished:
                share = "" if task.total is None else f" ({task.completed / max(task.total, 1):.0%} done)"
                line = f"{task.description}{share}, {time.monotonic() - begun:.0f} s"
                STDERR.print(line, markup=False, highlight=False, soft_wrap=True)
