"""The output of commands: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TransferSpeedColumn
from rich.text import Text

from tvm_split.progress import STDERR, progress_bars

if TYPE_CHECKING:
    from schedules.tuning.tuner import TuningProgress

STDOUT = Console()
"""The console for standard output; within a command's process ``sys.stdout`` is redirected to standard error."""


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout; a command with ``--json`` prints nothing else there."""
    STDOUT.file.write(json.dumps(value, indent=2) + "\n")


def print_line(text: str) -> None:
    """Print a sentence on stdout without markup; on a terminal it is wrapped to the width."""
    STDOUT.print(text, markup=False, highlight=False, soft_wrap=not STDOUT.is_terminal)


def print_unwrapped(text: str) -> None:
    """Print a line on stdout unchanged, so that programs can read it."""
    STDOUT.out(text, highlight=False)


def print_error(text: str) -> None:
    # Not wrapped, so that a path or a command in the message can be copied and searched for.
    STDERR.print(Text("error: ", "bold red") + Text(text, "red"), soft_wrap=True)


def print_note(text: str) -> None:
    STDERR.print(Text(text, "dim"), soft_wrap=True)


@contextmanager
def transfer_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that updates a machine's progress bar: its name, the bytes sent so far, the bytes in total."""
    with progress_bars(BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bars:
        bars.add_task("deploying", total=None)
        tasks: dict[str, Any] = {}

        def report(machine: str, sent: int, total: int) -> None:
            if machine not in tasks:
                tasks[machine] = bars.add_task(f"sending to {machine}", total=total)
            bars.update(tasks[machine], completed=sent, total=total)

        yield report


@contextmanager
def tuning_progress() -> Iterator[Callable[[TuningProgress], None]]:
    """Yield a function that updates the bar of tuning trials: the current kernel, the best result, the time left."""
    with progress_bars(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}", markup=False)) as bars:
        task = bars.add_task("preparing", total=None, left="")

        def report(progress: TuningProgress) -> None:
            best = ""
            if progress.best_seconds and progress.default_seconds:
                best = f": best {progress.best_seconds * 1e6:.1f} µs, default {progress.default_seconds * 1e6:.1f} µs"
            remaining = (
                "" if progress.seconds_left is None else f"{timedelta(seconds=round(progress.seconds_left))} left"
            )
            bars.update(
                task,
                description=f"{progress.doing}, {progress.kernel}{best}",
                completed=progress.trials_done,
                total=progress.trials,
                left=remaining,
            )

        yield report
