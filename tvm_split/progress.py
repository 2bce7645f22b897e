"""Progress in steps, shown on stderr: a bar on a terminal, elsewhere a line every ten seconds.

The variable TVM_SPLIT_PROGRESS=0 turns both off. An operation within another one is shown in its place.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
    """Return a decorator that shows the steps of ``what`` on stderr if a call gives no ``on_progress``."""

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


class _Shown:
    """The task of a `Progress` that shows the steps of an operation."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def begin(self, what: str) -> None:
        """Show an operation with a yet unknown number of steps, instead of the operation before."""
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._task = self._bars.add_task(what, total=None)
        self._step: tuple[str, int, int | None] = what, 0, None

    def step(self, what: str, done: int, steps: int) -> None:
        self._step = what, done, steps
        if done % max(1, steps // MOST_DRAWN) == 0:  # limit the cost of drawing short steps
            self._bars.update(self._task, description=what, completed=done, total=steps)

    def part(self, what: str, share: float) -> None:
        step, done, steps = self._step
        self._bars.update(self._task, description=f"{step}: {what}", completed=done + share, total=steps)


_SHOWN: ContextVar[_Shown | None] = ContextVar("_SHOWN", default=None)
"""The display of the steps of this thread's operation; None outside such an operation."""


def show_part(what: str, done: int = 0, parts: int = 1) -> None:
    """Show a part of the current step, and how many parts are done, if this thread's operation shows its steps."""
    shown = _SHOWN.get()
    if shown is not None:
        shown.part(what, done / parts)


@contextmanager
def step_progress(what: str) -> Iterator[StepProgress]:
    """Show counted steps; yields a function to call with the current step, the steps done and all steps."""
    outer = _SHOWN.get()
    if outer is not None:
        outer.begin(what)
        yield outer.step
        return
    with progress_bars(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bars:
        shown = _Shown(bars)
        shown.begin(what)
        token = _SHOWN.set(shown)
        try:
            yield shown.step
        finally:
            _SHOWN.reset(token)


@contextmanager
def progress_bars(*columns: ProgressColumn) -> Iterator[Progress]:
    """Show one bar per task that is added to the yielded `Progress`; lines instead of bars without a terminal."""
    console = Console(file=sys.stderr)  # as it is now: while a frontend runs, other output there is held back
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal or os.environ.get(PROGRESS_VARIABLE) == "0",
    )
    ended = threading.Event()
    lines = threading.Thread(target=_say_lines, args=(bars, ended), name="progress", daemon=True)
    if not console.is_terminal and os.environ.get(PROGRESS_VARIABLE) != "0":
        lines.start()
    try:
        with bars:
            yield bars
    finally:
        ended.set()
        if lines.ident is not None:
            lines.join()  # the caller may close what it writes to


def _say_lines(bars: Progress, ended: threading.Event) -> None:
    begun = time.monotonic()
    while not ended.wait(SECONDS_BETWEEN_LINES):
        for task in [task for task in bars.tasks if not task.finished] or bars.tasks[-1:]:
            share = "" if task.total is None else f" ({task.completed / max(task.total, 1):.0%} done)"
            line = f"{task.description}{share}, {time.monotonic() - begun:.0f} s"
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
