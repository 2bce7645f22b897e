"""Ctrl-C and SIGTERM end a command within a second or two, in one line, with 130 and 143, whatever it is doing.

The main thread may be inside of TVM, which takes minutes to come back to Python, and makes errors of its own from a
KeyboardInterrupt in one of its callbacks. So nothing is raised there: another thread waits for signals, clears away
what the command would leave behind, and ends the process. A command that handles a signal itself is left alone.
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
"""Longer than clearing away takes; then the process ends with 1."""
SHOW_CURSOR = "\r\x1b[K\x1b[?25h"
"""A bar hides it, and nobody comes back to show it again; its line is wiped."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, both signals end the process, unless it was started so as to ignore them. For the main thread."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)  # first, or one that comes between would be written nowhere
    ending = threading.Event()
    threading.Thread(target=_wait, args=(heard, ending), name="signals", daemon=True).start()
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _heard)
    try:
        yield
    finally:
        if ending.is_set():
            threading.Event().wait()  # an error that comes of what is cleared away is not how this ends


_HEARD: set[int] = set()


def _heard(number: int, frame: FrameType | None) -> None:
    """Only a handler of Python's own has signals written to the pipe."""
    _HEARD.add(number)


def _wait(heard: int, ending: threading.Event) -> None:
    while True:
        for number in os.read(heard, 64):
            # The command may have begun to handle it itself before this thread had its turn. Python calls the handler
            # of what came before it takes another one, so this looks at the present one first.
            if signal.getsignal(number) is _heard or number in _HEARD:
                ending.set()
                _end(signal.Signals(number))


def _end(number: signal.Signals) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    # Without Python's lock, should what is cleared away stand still with it.
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=nothing)
    text = SHOW_CURSOR if sys.stderr.isatty() else ""
    errors = os.dup(2)
    # What fails from now on, because it is cleared away, is nobody's concern.
    for stream in (1, 2, STDOUT.file.fileno()):
        os.dup2(nothing, stream)
    with suppress(OSError):  # whoever read it may have gone, by the same signal
        os.write(errors, f"{text}{WORDS[number]}\n".encode())
    os.close(errors)
    try:
        clear_away()
        # What nobody knows of yet or any more: builders, linkers. They take away what they wrote if they are asked.
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
