"""Attempts to build candidate plans: what could not be built, and when their time is over."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tvm_split.errors import PlanError, last_line
from tvm_split.placement.problem import Stage

MOST_NAMED = 3
"""Most reasons for which candidates could not be built that are named."""

Built = TypeVar("Built")


class Attempts:
    """Attempts until ``deadline``, a time of the monotonic clock. A fault in one never ends the others."""

    def __init__(self, deadline: float = math.inf) -> None:
        self._started, self._deadline = time.monotonic(), deadline
        self.was_late = False
        """Whether `is_late` has ever said so."""
        self._failed: dict[str, str] = {}
        """The first stages that failed, by the reason."""

    def is_late(self, fraction: float = 1.0) -> bool:
        """Whether this fraction of the time is over."""
        is_late = time.monotonic() > self._started + fraction * (self._deadline - self._started)
        self.was_late |= is_late
        return is_late

    def built(self, stages: Sequence[Stage], build: Callable[[], Built], *, may_refuse: bool = False) -> Built | None:
        """What ``build`` makes of stages; None if it fails in any way, which `notes` will say.

        With ``may_refuse``, a `PlanError` answers a question of the search, and leaves no note.
        """
        try:
            return build()
        except Exception as error:
            if not (may_refuse and isinstance(error, PlanError)):
                kind = "" if isinstance(error, PlanError) else f"{type(error).__name__}: "
                self._failed.setdefault(kind + last_line(error), _regions(stages))
            return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the reader of a plan."""
        notes = [f"{regions} could not be built ({why})" for why, regions in self._failed.items()]
        late = ["the time limit ended the search of splits inside layers"] * self.was_late
        return (*late, *notes[:MOST_NAMED])


def _regions(stages: Sequence[Stage]) -> str:
    return " and ".join(
        f"{stage.layers[0]!r} to {stage.layers[-1]!r} by {stage.sharding.axis} ({stage.sharding.exchange})"
        for stage in stages
        if stage.sharding
    )
