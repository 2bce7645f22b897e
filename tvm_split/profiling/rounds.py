"""Repeats measurements until the fastest one is confirmed: the rule about noise in this package.

Other programs can only make a measurement longer. So the fastest of several is the best one, if a second one is close
to it: a single fast one may be a clock error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key")
Measured = TypeVar("Measured")

WITHIN = 0.05
"""Largest relative difference between two undisturbed measurements of the same thing."""
ROUNDS = (3, 9)
"""Number of rounds for every measurement, and largest number for unconfirmed ones."""


class Confirmed(NamedTuple, Generic[Measured]):
    """The fastest measurement, and whether another one came close to it."""

    fastest: Measured
    is_confirmed: bool


def confirmed_fastest(
    measures: Mapping[Key, Callable[[], Measured]],
    seconds_of: Callable[[Measured], float],
    *,
    limit_seconds: float,
    within: float = WITHIN,
    rounds: tuple[int, int] = ROUNDS,
) -> dict[Key, Confirmed[Measured]]:
    """Return the fastest measurement by key. Rounds alternate their order, so that no key always follows the same one.

    After the first number of ``rounds``, only unconfirmed keys are measured again, up to the second number of rounds.
    No round starts that would probably end after ``limit_seconds``, except the first one.
    """
    samples: dict[Key, list[Measured]] = {key: [] for key in measures}
    begin = time.monotonic()
    for number in range(rounds[1]):
        wanted = [key for key in measures if number < rounds[0] or not _is_confirmed(samples[key], seconds_of, within)]
        if not wanted or (number and (time.monotonic() - begin) * (number + 1) / number > limit_seconds):
            break
        for key in wanted if number % 2 == 0 else reversed(wanted):
            samples[key].append(measures[key]())
    return {
        key: Confirmed(min(found, key=seconds_of), _is_confirmed(found, seconds_of, within))
        for key, found in samples.items()
    }


def _is_confirmed(samples: list[Measured], seconds_of: Callable[[Measured], float], within: float) -> bool:
    fastest, *others = sorted(map(seconds_of, samples))
    return bool(others) and others[0] <= fastest * (1 + within)
