"""What commands write: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TransferSpeedColumn
from rich.text import Text

from tvm_split.progress import STDERR, progress_bars

if TYPE_CHECKING:
    from schedules.tuning import TuningProgress

STDOUT = Console()
"""The only way to standard output: in the process of a command, ``sys.stdout`` leads to standard error."""


def print_json(value: Any) -> None:
    """The only thing that a command with ``--json`` writes to stdout."""
    STDOUT.file.write(json.dumps(value, indent=2) + "\n")


def print_json_file(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
    print_note(f"written to {path}")


def print_line(text: str) -> None:
    """A sentence on stdout, wrapped as tables are, and not marked up."""
    STDOUT.print(text, markup=False, highlight=False)


def print_unwrapped(text: str) -> None:
    """A line on stdout as it is, for programs to read."""
    STDOUT.out(text, highlight=False)


def print_error(text: str) -> None:
    # Not wrapped, so that a path or a command in the message can be copied and searched for.
    STDERR.print(Text("error: ", "bold red") + Text(text, "red"), soft_wrap=True)


def print_note(text: str) -> None:
    STDERR.print(Text(text, "dim"), soft_wrap=True)


@contextmanager
def transfer_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per machine, to be called with its name, the bytes sent to it so far and all that it lacks."""
    with progress_bars(BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bars:
        tasks: dict[str, Any] = {}

        def report(machine: str, sent: int, total: int) -> None:
            if machine not in tasks:
                tasks[machine] = bars.add_task(f"sending to {machine}", total=total)
            bars.update(tasks[machine], completed=sent, total=total)

        yield report


@contextmanager
def tuning_progress() -> Iterator[Callable[[TuningProgress], None]]:
    """A bar of trials with what is being tuned, the best so far and the time left."""
    with progress_bars(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}", markup=False)) as bars:
        task = bars.add_task("preparing", total=None, left="")

        def report(progress: TuningProgress) -> None:
            best = ""
            if progress.best_seconds and progress.default_seconds:
                best = f": best {progress.best_seconds * 1e6:.1f} µs, default {progress.default_seconds * 1e6:.1f} µs"
            left = "" if progress.seconds_left is None else f"{timedelta(seconds=round(progress.seconds_left))} left"
            bars.update(
                task,
                description=f"{progress.doing}, {progress.kernel}{best}",
                completed=progress.trials_done,
                total=progress.trials,
                left=left,
            )

        yield report
