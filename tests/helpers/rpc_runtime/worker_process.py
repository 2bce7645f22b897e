"""Starts worker processes for one test, with any arguments."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Start = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).resolve().parents[3]
STATE_VARIABLE = "XDG_STATE_HOME"
"""The variable with the folder for the tokens of workers."""


def start_worker(
    cache: Path, *arguments: str, within: Sequence[str] = (), python: str = sys.executable, **environment: str
) -> subprocess.Popen[str]:
    """Start a worker. ``within`` is a command that runs another one, before the worker's own."""
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
    """Return the ready line of a worker with ``--json``."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    announcement = json.loads(line)
    assert isinstance(announcement, dict)
    return announcement


def ready(process: subprocess.Popen[str]) -> str:
    """Return the address of a worker with ``--json``, after waiting until it listens."""
    return str(announced(process)["address"])
