"""Counted steps of long operations, and the callback that reports them."""

from __future__ import annotations

import threading
from collections.abc import Callable

StepProgress = Callable[[str, int, int], None]
"""Callback with the current step, the number of steps done and of all steps; called from one thread at a time."""


class Steps:
    """Counts and reports steps; ``total`` may grow during the operation. Thread-safe."""

    def __init__(self, report: StepProgress | None) -> None:
        self._report = report or (lambda what, done, steps: None)
        self._lock = threading.Lock()
        self._begun = 0
        self.total = 0

    def begin(self, what: str) -> None:
        with self._lock:
            self._report(what, self._begun, max(self.total, self._begun + 1))
            self._begun += 1

    def done(self) -> None:
        self.total = max(self.total, self._begun)
        self._report("done", self.total, self.total)
