"""Limits of a search: wall-clock time, counted work, or both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

WORK_PER_SECOND = 2.0e8
"""Units of work per second, about. One unit is one matrix element that numpy reads and writes."""
EVALUATION_WORK = 4.0e4
"""Units of work to evaluate one plan, per stage."""


class OutOfBudgetError(Exception):
    """Raised when the budget is used up before a computation is finished."""


@dataclass
class _Meter:
    """Units of work done since the first budget was created; derived budgets share it."""

    work: float = 0.0


class Budget:
    """A limit in wall-clock seconds and a limit in units of work; the search ends when it reaches either of them.

    The search counts its work itself. Therefore a limit on work alone gives the same plan on every machine, under any
    load.

    Args:
        seconds: wall-clock seconds from now on.
        work: units of work; `WORK_PER_SECOND` units take about a second.
    """

    def __init__(self, seconds: float = math.inf, work: float = math.inf, _meter: _Meter | None = None) -> None:
        self._meter = _meter or _Meter()
        self._seconds, self._work = seconds, work
        self._start, self._work_before = time.monotonic(), self._meter.work

    def spend(self, work: float) -> None:
        """Add units of work that were done."""
        self._meter.work += work

    @property
    def is_used_up(self) -> bool:
        return self.used_share >= 1.0

    @property
    def used_share(self) -> float:
        """Share of the budget that is used; 1 or more if nothing is left."""
        seconds, work = time.monotonic() - self._start, self._meter.work - self._work_before
        if (math.isfinite(self._seconds) and seconds >= self._seconds) or work >= self._work:
            return 1.0
        return max(seconds / self._seconds if math.isfinite(self._seconds) else 0.0, work / self._work)

    @property
    def seconds_left(self) -> float:
        """Wall-clock seconds left; infinite if only the work is limited."""
        return max(0.0, self._seconds - (time.monotonic() - self._start))

    @property
    def whole_work(self) -> float:
        """Approximate units of work that both limits allowed at the start."""
        return min(self._work, self._seconds * WORK_PER_SECOND)

    def until(self, share: float) -> Budget:
        """Return a budget that ends when ``share`` of this budget is used."""
        part = Budget(self._seconds * share, self._work * share, self._meter)
        part._start, part._work_before = self._start, self._work_before
        return part

    def rest(self, share: float = 1.0) -> Budget:
        """Return a budget of ``share`` of what is left now."""
        work = self._work - (self._meter.work - self._work_before)
        return Budget(self.seconds_left * share, max(0.0, work) * share, self._meter)

    def require(self) -> None:
        """Raise `OutOfBudgetError` if nothing is left."""
        if self.is_used_up:
            raise OutOfBudgetError
