"""Bars for what takes long, on stderr, and only where a person looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

STDERR = Console(stderr=True)


@contextmanager
def step_progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for counted steps, to be called with what is being done, the steps done and all steps."""
    with progress_bars(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bars:
        task = bars.add_task(what, total=None)
        yield lambda description, done, steps: bars.update(task, description=description, completed=done, total=steps)


def progress_bars(*columns: ProgressColumn) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *columns,
        console=STDERR,
        transient=True,
        disable=not STDERR.is_terminal,
    )
