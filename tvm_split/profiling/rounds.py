"""What is measured how often, and together with what: the rule about noise, and rounds of pairs.

Other programs can only make a measurement longer. So the fastest of several is the best one, if a second one is close
to it: a single fast one may be a clock error.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key")
Measured = TypeVar("Measured")
Item = TypeVar("Item", bound=Hashable)

WITHIN = 0.05
"""Largest relative difference between two undisturbed measurements of the same thing."""
ROUNDS = (3, 9)
"""Number of rounds for every measurement, and largest number for unconfirmed ones."""
PARALLEL_PAIRS = 4
"""Most pairs of machines whose links are measured at the same time."""


class Confirmed(NamedTuple, Generic[Measured]):
    """The fastest measurement, and whether another one came close to it."""

    fastest: Measured
    is_confirmed: bool


def confirmed_fastest(
    measures: Mapping[Key, Callable[[], Measured]],
    seconds_of: Callable[[Measured], float],
    *,
    limit_seconds: float,
) -> dict[Key, Confirmed[Measured]]:
    """Return the fastest measurement by key. Rounds alternate their order, so that no key always follows the same one.

    After the first number of `ROUNDS`, only unconfirmed keys are measured again, up to the second number of rounds.
    No round starts that would probably end after ``limit_seconds``, except the first one.
    """
    samples: dict[Key, list[Measured]] = {key: [] for key in measures}
    begin = time.monotonic()
    for number in range(ROUNDS[1]):
        pending = [key for key in measures if number < ROUNDS[0] or not _is_confirmed(samples[key], seconds_of)]
        if not pending or (number and (time.monotonic() - begin) * (number + 1) / number > limit_seconds):
            break
        for key in pending if number % 2 == 0 else reversed(pending):
            samples[key].append(measures[key]())
    return {
        key: Confirmed(min(key_samples, key=seconds_of), _is_confirmed(key_samples, seconds_of))
        for key, key_samples in samples.items()
    }


def _is_confirmed(samples: list[Measured], seconds_of: Callable[[Measured], float]) -> bool:
    fastest, *slower = sorted(map(seconds_of, samples))
    return bool(slower) and slower[0] <= fastest * (1 + WITHIN)


def first_and_last(items: Iterable[Item], class_of: Callable[[Item], Hashable]) -> list[Item]:
    """Return the items to measure: the first and the last of every class, the two most likely to differ."""
    classes: dict[Hashable, list[Item]] = {}
    for item in items:
        classes.setdefault(class_of(item), []).append(item)
    return [item for members in classes.values() for item in dict.fromkeys((members[0], members[-1]))]


def rounds_of(pairs: Sequence[tuple[str, str]], hosts: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the pairs in groups of at most `PARALLEL_PAIRS`; no host occurs in two pairs. ``hosts`` is by machine."""
    waiting = list(pairs)
    while waiting:
        together: list[tuple[str, str]] = []
        busy: set[str] = set()
        for pair in waiting:
            ends = {hosts[name] for name in pair}
            if len(together) < PARALLEL_PAIRS and not ends & busy:
                together.append(pair)
                busy |= ends
        yield together
        waiting = [pair for pair in waiting if pair not in together]
