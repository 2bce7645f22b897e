"""End a command on Ctrl-C or SIGTERM within a second or two, with one line of output and exit code 130 or 143.

The main thread may be inside TVM, which may return to Python only after minutes, and turns a KeyboardInterrupt in a
callback into errors of its own. So nothing is raised there: another thread waits for signals, cleans up the command's
temporary files and processes, and ends the process. A command that handles a signal itself is left alone.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rpc_runtime.processes import clear_away
from tvm_split.display.console import STDOUT

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
END_SECONDS = 20.0
"""The time limit for cleaning up, longer than it takes; then the process ends with exit code 1."""
SHOW_CURSOR = "\r\x1b[K\x1b[?25h"
"""Erases the line of a progress bar and shows the cursor, which the bar has hidden."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let both signals end the process in this context, unless it was started ignoring them. For the main thread."""
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)  # before the handlers, so that no signal is lost
    ending = threading.Event()
    threading.Thread(target=_wait, args=(wakeup_reader, ending), name="signals", daemon=True).start()
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _heard)
    try:
        yield
    finally:
        if ending.is_set():
            threading.Event().wait()  # cleaning up may cause errors here; they must not end the process


_HEARD: set[int] = set()


def _heard(number: int, frame: FrameType | None) -> None:
    """Record a signal; Python writes a signal's number to the wakeup pipe only if it has a Python handler."""
    _HEARD.add(number)


def _wait(heard: int, ending: threading.Event) -> None:
    while True:
        for number in os.read(heard, 64):
            # The command may have installed its own handler before this thread ran. Python runs pending handlers
            # before it installs another one, so check the current handler first, then the recorded signals.
            if signal.getsignal(number) is _heard or number in _HEARD:
                ending.set()
                _end(signal.Signals(number))


def _end(number: signal.Signals) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    # A timer that works without the GIL, in case cleaning up hangs while it holds the GIL.
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=nothing)
    text = SHOW_CURSOR if sys.stderr.isatty() else ""
    errors = os.dup(2)
    # Hide the output of everything that fails from now on because of the cleaning up.
    for stream in (1, 2, STDOUT.file.fileno()):
        os.dup2(nothing, stream)
    with suppress(OSError):  # the same signal may have ended the reader
        os.write(errors, f"{text}{WORDS[number]}\n".encode())
    os.close(errors)
    try:
        clear_away()
        # Other child processes, such as builders and linkers, remove their files on SIGTERM.
        _kill_children(signal.SIGTERM)
        time.sleep(0.2)
        _kill_children(signal.SIGKILL)
    finally:
        os._exit(128 + number)


def _kill_children(number: signal.Signals) -> None:
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), number)
