"""What benchmarks and checks share: sides measured in turns, medians and ratios over rounds, differences, and JSON.

A disturbance of the machine meets all sides of a round alike, so ratios are taken within a round, and of these the
median over rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

PAUSE_SECONDS = 0.1

Item = TypeVar("Item")
Figures = dict[str, float]
"""Names, with their units, to values."""
Rounds = dict[str, list[Figures]]
"""Sides to their figures, one entry a round."""


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """The items in their order, another one first in each round."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]


def in_turns(sides: Mapping[str, Callable[[], Figures]], rounds: int) -> Rounds:
    """The figures of every side, each measured once a round, after a pause: threads of some spin after their work."""
    found: Rounds = {name: [] for name in sides}
    for number in range(rounds):
        for name in rotated(list(sides), number):
            time.sleep(PAUSE_SECONDS)
            found[name].append(sides[name]())
    return found


def medians(found: Rounds) -> dict[str, Figures]:
    """Over rounds, of every figure of every side."""
    return {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }


def ratio(found: Rounds, key: str, side: str, other: str) -> float:
    """A figure of ``side`` by that of ``other``: the median of the rounds' ratios; not a number where one is zero."""
    pairs = zip(found[side], found[other], strict=True)
    return statistics.median(mine[key] / theirs[key] if theirs[key] else float("nan") for mine, theirs in pairs)


def median_seconds(run: Callable[[], object], runs: int) -> Figures:
    """The seconds of a call, the median of so many after one that does not count."""
    run()
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return {"seconds": statistics.median(found)}


def largest_difference(found: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> float:
    """Of outputs to those that are right, as a share of the range of these."""
    return max(float(np.abs(mine - right).max() / np.ptp(right)) for mine, right in zip(found, expected, strict=True))


def two_cores() -> tuple[int, int]:
    """Those that the first two workers of one thread each are pinned to.

    Raises:
        SystemExit: this process may use one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two workers of one core each are compared here, and this process may run on one core only")
    return cores[0], cores[1]


def written(path: Path | None, content: Mapping[str, Any]) -> None:
    """Writes results as JSON, with the load they were taken under, if a path is given."""
    if path is not None:
        path.write_text(json.dumps({**content, "load_average": os.getloadavg()}, indent=2) + "\n")
