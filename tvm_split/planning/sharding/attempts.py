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
    """Attempts until ``deadline``, in seconds of `time.monotonic`. An error in one never ends the others."""

    def __init__(self, deadline: float = math.inf) -> None:
        self._started, self._deadline = time.monotonic(), deadline
        self.was_late = False
        """Whether `is_late` has ever said so."""
        self._failed: dict[str, str] = {}
        """The first stages that failed, by the reason."""

    def is_late(self, fraction: float = 1.0) -> bool:
        """Return whether this fraction of the time from the start to the deadline has passed."""
        is_late = time.monotonic() > self._started + fraction * (self._deadline - self._started)
        self.was_late |= is_late
        return is_late

    def built(self, stages: Sequence[Stage], build: Callable[[], Built], *, may_refuse: bool = False) -> Built | None:
        """Return the result of ``build``, which uses these stages; None if it raises an error, which `notes` will name.

        With ``may_refuse``, a `PlanError` is an expected answer and leaves no note.
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
        """Sentences for the plan's reader: which stages could not be built and why, and whether time ran out."""
        notes = [f"{regions} could not be built ({why})" for why, regions in self._failed.items()]
        late = ["the time limit ended the search of splits inside layers"] * self.was_late
        return (*late, *notes[:MOST_NAMED])


def _regions(stages: Sequence[Stage]) -> str:
    return " and ".join(
        f"{stage.layers[0]!r} to {stage.layers[-1]!r} by {stage.sharding.axis} ({stage.sharding.exchange})"
        for stage in stages
        if stage.sharding
    )
