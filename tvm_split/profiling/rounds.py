"""Repeats measurements until the fastest is confirmed: the only rule about noise in this package.

Other programs only make a measurement longer. So the fastest of several is the best one, once another comes close to
it: a single fast one may be an error of a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key")
Measured = TypeVar("Measured")

WITHIN = 0.05
"""By which two undisturbed measurements of the same thing differ at most."""
ROUNDS = (3, 9)
"""Rounds that everything gets, and rounds after which what is still unconfirmed stays so."""


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
    """The fastest measurement by key. Rounds alternate their order, so that no key always comes after the same one.

    From the first number of ``rounds`` on, only what is unconfirmed is measured again: up to the second number, or as
    long as another round as long as those before would end within ``limit_seconds``.
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
