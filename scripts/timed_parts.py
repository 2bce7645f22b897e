"""Parts of a run that has to end within its time: what was not reached, or did not end, is told as such."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

GRACE_SECONDS = 15.0
"""What a part that is told to end may take for that; then the process ends, in another so many at most."""
LAST_START = {"networks": 0.55, "pipelines": 0.7, "kernels": 0.75, "torch.compile": 0.9}
"""The share of the time after which no other part of a kind is begun."""
END = {"networks": 0.65, "pipelines": 0.8, "kernels": 0.9, "torch.compile": 1.0}
"""The share at which one that is under way is told to end, so that something of every kind is found."""

Part = Callable[[], dict[str, Any]]


class TimeIsUp(BaseException):
    """Raised in a part that is under way when all time is used: no part's own errors are meant by it."""


class TimedParts:
    """Runs parts one after the other, as long as there is time, and keeps what became of each. For the main thread.

    Kinds of parts are those of `LAST_START`. One that is under way when its kind has no time left is told to end, again
    and again; if it does not, the process does when all time is used. ``keep`` is called after each, to write what was
    found so far.
    """

    def __init__(self, seconds: float, console: Console, keep: Callable[[], None]) -> None:
        self._begun, self._seconds, self._console, self._keep = time.monotonic(), seconds, console, keep
        signal.signal(signal.SIGALRM, self._end_part)
        self._ended = False
        self.not_reached: list[str] = []
        self.failed: dict[str, str] = {}

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun

    def run(self, kind: str, what: str, found: list[dict[str, Any]], part: Part) -> None:
        """What the part finds is added to ``found``."""
        if self.seconds > LAST_START[kind] * self._seconds:
            self.not_reached.append(what)
            return
        self._console.print(f"{self.seconds:4.0f} s  {what}", markup=False, highlight=False)
        self._ended = False
        end = threading.Timer(self._seconds - self.seconds + GRACE_SECONDS, self._end_all, [what])
        end.daemon = True
        end.start()
        # The thread that ends this process if what computes lets no other one run.
        faulthandler.dump_traceback_later(self._seconds - self.seconds + 2 * GRACE_SECONDS, exit=True)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, END[kind] * self._seconds - self.seconds, GRACE_SECONDS)
                found.append(part())
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                end.cancel()
                faulthandler.cancel_dump_traceback_later()
        except TimeIsUp:
            self.not_reached.append(what)
        except Exception as error:  # of one network, which others may not share
            if self._ended:  # what came of it on its way through a compiler
                self.not_reached.append(what)
            else:
                self.failed[what] = f"{type(error).__name__}: {error}"
                self._console.print(f"        failed: {self.failed[what]}", markup=False, highlight=False)
        self._keep()

    def _end_part(self, number: int, frame: object) -> None:
        self._ended = True
        raise TimeIsUp

    def _end_all(self, what: str) -> None:
        self.not_reached.append(what)
        self._keep()
        self._console.print(f"{what} does not end within its time, and is left behind", markup=False, highlight=False)
        os._exit(1)  # the workers end with this process
