"""Ctrl-C while a process loads its modules: it ends at once and without a word, with the code that it has later on.

Whatever Python is importing when it is interrupted would write a traceback, and no ``except`` of ours is there yet. So
the modules that processes start with import this one first, which needs next to nothing itself, and call `end_quietly`.
"""

import os
import signal


def _end(number: int, frame: object) -> None:
    os._exit(128 + signal.SIGINT)


def end_quietly() -> None:
    """From now on Ctrl-C ends this process; one that was started so as to ignore it still does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
