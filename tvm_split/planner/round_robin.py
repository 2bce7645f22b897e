"""What turns make of the shares that a search gives replicas: some are so rare that there are no turns for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rpc_runtime.program.turns import DIVISIBLE, LONGEST, LONGEST_CYCLE, LONGEST_PER_REPLICA, whole_turns
from tvm_split.planner.problem import Stage

TURNS_PER_REPLICA = 16
"""Of many unlike replicas each has half a turn less than its share on average: 3 % of their time."""
ROUNDING = 1e-9


def with_turns(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with shares as turns give them; replicas may be left out, such as those with less than a turn."""
    are_dealt = [len(stage.machines) > 1 and stage.sharding is None for stage in stages]
    shares = [stage.shares for stage, is_dealt in zip(stages, are_dealt, strict=True) if is_dealt]
    counts = iter(fairest_turns(shares))
    return tuple(
        _with_turns(stage, next(counts)) if is_dealt else stage
        for stage, is_dealt in zip(stages, are_dealt, strict=True)
    )


def _with_turns(stage: Stage, counts: Sequence[int]) -> Stage:
    kept = [place for place, count in enumerate(counts) if count]
    shares = tuple(counts[place] / sum(counts) for place in kept)
    return replace(stage, machines=tuple(stage.machines[place] for place in kept), shares=shares)


def fairest_turns(stages: Sequence[Sequence[float]], periods: Sequence[float] | None = None) -> list[tuple[int, ...]]:
    """How many turns each replica of each stage has, or none, so that who has most beyond its share has least.

    Shares that are whole turns already stay, if those of all stages are: their lists may be longer than others.

    For turns of a length it is best to give each to the replica that has least beyond its share with it (Jefferson's
    method: Balinski, Young 1982, "Fair Representation"). So another replica does not make this worse. Equal ones have a
    turn each. The lengths of several stages have a common multiple of at most `LONGEST_CYCLE`, chosen for the one that
    takes longest with its turns; of equally good ones the shortest is taken.

    Args:
        stages: of each the shares of its replicas, which count in proportion.
        periods: of each stage, if its replicas had just these shares; by default they are equal.
    """
    exact = [each for each in map(whole_turns, stages) if each is not None]
    if len(exact) == len(stages) and math.lcm(*map(sum, exact)) <= LONGEST_CYCLE:
        return exact
    dealt = [_dealt(shares) for shares in stages]
    if len(dealt) < 2:
        return [each.counts(_first_least(each.beyond) + 1) for each in dealt]
    longest = min(max(DIVISIBLE, sum(len(each.beyond) for each in dealt)), LONGEST_CYCLE)
    longest_period = np.zeros(longest)
    for each, period in zip(dealt, periods or [1.0] * len(dealt), strict=True):
        longest_period = np.maximum(longest_period, period * each.least_beyond(longest))
    return [each.counts(_first_least(longest_period) + 1) for each in dealt]


@dataclass(frozen=True)
class _Dealt:
    """Turns of one stage: ``beyond[length - 1]`` is the most that any of ``replicas[:length]``, who have turns of this
    length, has by its share."""

    count: int
    replicas: npt.NDArray[np.intp]
    beyond: npt.NDArray[np.float64]

    def least_beyond(self, longest: int) -> npt.NDArray[np.float64]:
        """By turns that repeat after 1, 2, … micro-batches, up to the longest."""
        found = np.full(longest, math.inf)
        for length, beyond in enumerate(self.beyond.tolist(), 1):
            np.minimum(found[length - 1 :: length], beyond, out=found[length - 1 :: length])
        return found

    def counts(self, cycle: int) -> tuple[int, ...]:
        """Of each replica by the best turns that repeat after so many micro-batches."""
        lengths = [length for length in range(1, min(cycle, len(self.beyond)) + 1) if cycle % length == 0]
        length = lengths[_first_least(self.beyond[np.array(lengths) - 1])]
        return tuple(np.bincount(self.replicas[:length], minlength=self.count).tolist())


def _dealt(shares: Sequence[float]) -> _Dealt:
    """Each turn to who has least beyond its share with it: so one list has the turns of all lengths."""
    parts = np.array(shares) / math.fsum(shares)
    able = np.flatnonzero(parts)  # beside machines that take no time others have none
    longest = min(max(LONGEST, TURNS_PER_REPLICA * len(able)), LONGEST_CYCLE)
    most = np.floor((longest + len(able)) * parts[able]).astype(np.intp)  # together at least the longest
    replicas = np.repeat(able, most)
    numbers = np.arange(1, len(replicas) + 1) - np.repeat(np.cumsum(most) - most, most)
    beyond = numbers / parts[replicas]
    order = np.argsort(beyond, kind="stable")[:longest]
    lengths = np.arange(1, longest + 1)
    # Who reads the shares looks for turns of these lengths.
    kept = np.cumsum(numbers[order] == 1)
    is_found = lengths <= np.maximum(LONGEST, LONGEST_PER_REPLICA * kept)
    return _Dealt(len(parts), replicas[order], np.where(is_found, beyond[order] / lengths, math.inf))


def _first_least(values: npt.NDArray[np.float64]) -> int:
    return int(np.argmax(values <= values.min() * (1 + ROUNDING)))
