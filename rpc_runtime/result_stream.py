"""Reserves standard output for a process's results, and sends the output of libraries to standard error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO


def take_stdout() -> TextIO:
    """Return a stream to standard output, and redirect descriptor 1 and ``sys.stdout`` to standard error.

    Libraries write to descriptor 1 from C, and children inherit it. Only the entry point of a process may call this,
    and only once: in another program's process, standard output belongs to that program.
    """
    if sys.stdout is None:  # closed by the parent process
        return Path(os.devnull).open("w", encoding="utf-8")
    sys.stdout.flush()
    results = os.fdopen(
        os.dup(1),
        "w",
        buffering=1 if sys.stdout.line_buffering else -1,
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
    )
    os.dup2(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return results
