"""The one way in which tests wait for something that happens in another thread or process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def wait_for(look: Callable[[], Value], seconds: float = 10.0) -> Value:
    """What ``look`` gives once that is true, or what it gives last when the time is over."""
    deadline = time.monotonic() + seconds
    while not (value := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def wait_while_running(process: subprocess.Popen[str], look: Callable[[], Value], seconds: float = 150.0) -> Value:
    """As `wait_for`, of what a process brings about; fails with what it wrote if it ends before, or takes longer."""
    value = wait_for(lambda: process.poll() is not None or look(), seconds)
    assert process.poll() is None, process.communicate()
    assert value, f"it did not happen in {seconds} s"
    return value


def stop(process: int) -> None:
    """SIGSTOP; returns when all threads of a process stand still, which takes a moment on a busy machine."""
    os.kill(process, signal.SIGSTOP)

    def stands_still() -> bool:
        states = [
            path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{process}/task").glob("*/stat")
        ]
        return set(states) == {"T"}

    assert wait_for(stands_still)
