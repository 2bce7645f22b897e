"""Round the shares of replicas to whole turns of a round-robin schedule; replicas with tiny shares get no turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rpc_runtime.program.turns import DIVISIBLE, LONGEST, LONGEST_CYCLE, LONGEST_PER_REPLICA, whole_turns
from tvm_split.planner.problem import TOLERANCE, Stage

TURNS_PER_REPLICA = 16
"""Longest schedule in turns per replica. Many unequal replicas lose half a turn on average: 3 % of their time."""


def with_turns(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with shares rounded to whole turns; replicas without a turn are left out."""
    are_dealt = [len(stage.machines) > 1 and stage.sharding is None for stage in stages]
    shares = [stage.shares for stage, is_dealt in zip(stages, are_dealt, strict=True) if is_dealt]
    counts = iter(fairest_turns(shares))
    return tuple(
        _with_turns(stage, next(counts)) if is_dealt else stage
        for stage, is_dealt in zip(stages, are_dealt, strict=True)
    )


def _with_turns(stage: Stage, counts: Sequence[int]) -> Stage:
    places = [place for place, count in enumerate(counts) if count]
    shares = tuple(counts[place] / sum(counts) for place in places)
    return replace(stage, machines=tuple(stage.machines[place] for place in places), shares=shares)


def fairest_turns(stages: Sequence[Sequence[float]], periods: Sequence[float] | None = None) -> list[tuple[int, ...]]:
    """The number of turns (0 or more) of each replica of each stage that minimises the largest excess.

    The excess of a replica is the ratio of its turns to its share of them. If the shares of all stages are whole turns
    already, they stay: such schedules may be longer than others.

    For a given length it is optimal to give each turn to the replica with the least excess after it (Jefferson's
    method: Balinski, Young 1982, "Fair Representation"). So an additional replica does not make this worse, and equal
    replicas get one turn each. The schedule lengths of several stages have a common multiple of at most
    `LONGEST_CYCLE`, chosen to minimise the longest period of a stage; among equally good ones the shortest is taken.

    Args:
        stages: for each stage the shares of its replicas, which count in proportion.
        periods: the period of each stage if its replicas had exactly these shares; by default all are equal.
    """
    exact = [turns for turns in map(whole_turns, stages) if turns is not None]
    if len(exact) == len(stages) and math.lcm(*map(sum, exact)) <= LONGEST_CYCLE:
        return exact
    schedules = [_dealt(shares) for shares in stages]
    if len(schedules) < 2:
        return [schedule.counts(_first_least(schedule.beyond) + 1) for schedule in schedules]
    longest = min(max(DIVISIBLE, sum(len(schedule.beyond) for schedule in schedules)), LONGEST_CYCLE)
    longest_period = np.zeros(longest)
    for schedule, period in zip(schedules, periods or [1.0] * len(schedules), strict=True):
        longest_period = np.maximum(longest_period, period * schedule.least_beyond(longest))
    return [schedule.counts(_first_least(longest_period) + 1) for schedule in schedules]


@dataclass(frozen=True)
class _Dealt:
    """The schedules of one stage: the schedule of a length has the turns ``replicas[:length]``.

    ``beyond[length - 1]`` is the largest excess of a replica in the schedule of this length.
    """

    count: int
    replicas: npt.NDArray[np.intp]
    beyond: npt.NDArray[np.float64]

    def least_beyond(self, longest: int) -> npt.NDArray[np.float64]:
        """The least excess of any schedule that repeats after 1, 2, … micro-batches, up to ``longest``."""
        least = np.full(longest, math.inf)
        for length, beyond in enumerate(self.beyond.tolist(), 1):
            np.minimum(least[length - 1 :: length], beyond, out=least[length - 1 :: length])
        return least

    def counts(self, cycle: int) -> tuple[int, ...]:
        """Turns of each replica in the best schedule that repeats after ``cycle`` micro-batches."""
        lengths = [length for length in range(1, min(cycle, len(self.beyond)) + 1) if cycle % length == 0]
        length = lengths[_first_least(self.beyond[np.array(lengths) - 1])]
        return tuple(np.bincount(self.replicas[:length], minlength=self.count).tolist())


def _dealt(shares: Sequence[float]) -> _Dealt:
    """Give each turn to the replica with the least excess after it; prefixes of the list are the shorter schedules."""
    parts = np.array(shares) / math.fsum(shares)
    able = np.flatnonzero(parts)  # replicas with a share of 0 get no turn
    longest = min(max(LONGEST, TURNS_PER_REPLICA * len(able)), LONGEST_CYCLE)
    most = np.floor((longest + len(able)) * parts[able]).astype(np.intp)  # their sum is at least `longest`
    replicas = np.repeat(able, most)
    numbers = np.arange(1, len(replicas) + 1) - np.repeat(np.cumsum(most) - most, most)
    beyond = numbers / parts[replicas]
    order = np.argsort(beyond, kind="stable")[:longest]
    lengths = np.arange(1, longest + 1)
    # `turns_by_share`, which turns the shares back into a schedule, tries only these lengths.
    replica_counts = np.cumsum(numbers[order] == 1)
    is_tried = lengths <= np.maximum(LONGEST, LONGEST_PER_REPLICA * replica_counts)
    return _Dealt(len(parts), replicas[order], np.where(is_tried, beyond[order] / lengths, math.inf))


def _first_least(values: npt.NDArray[np.float64]) -> int:
    return int(np.argmax(values <= values.min() * (1 + TOLERANCE)))
