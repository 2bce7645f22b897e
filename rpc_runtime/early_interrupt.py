"""Ctrl-C and SIGTERM while a process loads its modules: it ends at once, with the code that a command has later on.

Ctrl-C ends it without a word, since whoever pressed it knows; of SIGTERM it says the word that a command has later on.
Whatever Python is importing when it is interrupted would write a traceback, and no ``except`` of ours is there yet. So
the modules that processes start with import this one first, which needs next to nothing itself, and call `end_quietly`.
"""

import os
import signal

TERMINATED = "terminated"


def _end(number: int, frame: object) -> None:
    try:
        if number == signal.SIGTERM:
            os.write(2, f"{TERMINATED}\n".encode())
    finally:  # whoever read it may have gone
        os._exit(128 + number)


def end_quietly() -> None:
    """From now on both end this process; one that was started so as to ignore one of them still does."""
    for number, unset in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is unset:
            signal.signal(number, _end)
