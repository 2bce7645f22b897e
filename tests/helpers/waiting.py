"""How tests wait for what happens in another thread or process."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


PATIENCE_SECONDS = 300.0
"""Timeout of every wait in the tests for an event that must happen; only a hang reaches it."""


def eventually(look: Callable[[], Value], what: str) -> Value:
    """Returns the first true value of ``look()``; raises an AssertionError that names ``what`` after the deadline."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:.0f} s: {what}; the last value is {value!r}"
        time.sleep(0.02)
    return value


def wait_while_running(process: subprocess.Popen[str], look: Callable[[], Value]) -> Value:
    """Returns the first true value of ``look()``; fails with the output of a process that ends before."""
    value = eventually(lambda: process.poll() is not None or look(), "the process gets as far as the test needs")
    assert process.poll() is None, process.communicate()
    return value


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """Stop all threads of a process while the body runs."""

    def stands_still() -> bool:
        try:
            texts = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
        except OSError:  # a thread has just ended
            return False
        return {text.rpartition(")")[2].split()[0] for text in texts} == {"T"}

    os.kill(process, signal.SIGSTOP)
    try:
        eventually(stands_still, "all threads stand still")
        yield
    finally:
        os.kill(process, signal.SIGCONT)
