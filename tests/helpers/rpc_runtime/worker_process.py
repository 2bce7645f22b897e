"""Worker processes that a test starts itself, with arguments of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Start = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).resolve().parents[3]
STATE_VARIABLE = "XDG_STATE_HOME"
"""Names the folder in which a worker's own token lies."""


def start_worker(
    cache: Path, *arguments: str, within: Sequence[str] = (), python: str = sys.executable, **environment: str
) -> subprocess.Popen[str]:
    """``within`` is a command that runs others, before the worker's own."""
    return subprocess.Popen(
        [*within, python, "-m", "rpc_runtime.worker", "--cache", str(cache), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def announced(process: subprocess.Popen[str]) -> dict[str, object]:
    """What a worker with ``--json`` says when it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    announcement = json.loads(line)
    assert isinstance(announcement, dict)
    return announcement


def ready(process: subprocess.Popen[str]) -> str:
    """The address of a worker with ``--json``, when it listens."""
    return str(announced(process)["address"])
