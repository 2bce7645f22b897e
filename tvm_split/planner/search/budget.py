"""How long a search may go on: by the clock, by a count of its work, or by both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

WORK_PER_SECOND = 2.0e8
"""Units of work that take about a second. One unit is an element of a matrix that numpy reads and writes."""
EVALUATION_WORK = 4.0e4
"""Of evaluating one plan, for each of its stages."""


class OutOfBudgetError(Exception):
    """A computation was not finished when its budget was used up."""


@dataclass
class _Meter:
    """Work done since the first budget was made."""

    work: float = 0.0


class Budget:
    """A limit in seconds of the clock and a limit in units of work; the first one that is reached ends the search.

    The search counts its work itself. So a limit to the work alone gives the same plan on every machine, however busy
    it is.

    Args:
        seconds: from now on.
        work: units, of which `WORK_PER_SECOND` take about a second.
    """

    def __init__(self, seconds: float = math.inf, work: float = math.inf, _meter: _Meter | None = None) -> None:
        self._meter = _meter or _Meter()
        self._seconds, self._work = seconds, work
        self._start, self._work_before = time.monotonic(), self._meter.work

    def spend(self, work: float) -> None:
        """Count work that was done."""
        self._meter.work += work

    @property
    def is_used_up(self) -> bool:
        return self.used_share >= 1.0

    @property
    def used_share(self) -> float:
        """How much of the budget is used; 1 or more if nothing is left."""
        seconds, work = time.monotonic() - self._start, self._meter.work - self._work_before
        if (math.isfinite(self._seconds) and seconds >= self._seconds) or work >= self._work:
            return 1.0
        return max(seconds / self._seconds if math.isfinite(self._seconds) else 0.0, work / self._work)

    @property
    def seconds_left(self) -> float:
        """Infinite if only the work is limited."""
        return max(0.0, self._seconds - (time.monotonic() - self._start))

    @property
    def work_left(self) -> float:
        """Units of work that the limits allow together, about."""
        work = self._work - (self._meter.work - self._work_before)
        return max(0.0, min(work, self.seconds_left * WORK_PER_SECOND))

    @property
    def whole_work(self) -> float:
        """Units of work that the limits allowed at the start, about."""
        return min(self._work, self._seconds * WORK_PER_SECOND)

    def until(self, share: float) -> Budget:
        """A budget that ends when so large a share of this one is used."""
        part = Budget(self._seconds * share, self._work * share, self._meter)
        part._start, part._work_before = self._start, self._work_before
        return part

    def rest(self, share: float = 1.0) -> Budget:
        """A share of what is left now."""
        work = self._work - (self._meter.work - self._work_before)
        return Budget(self.seconds_left * share, max(0.0, work) * share, self._meter)

    def require(self) -> None:
        """Raises `OutOfBudgetError` if nothing is left."""
        if self.is_used_up:
            raise OutOfBudgetError
