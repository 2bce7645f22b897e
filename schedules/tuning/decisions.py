"""A run's decisions: how many trials each kernel gets, which choices are measured next, and whether one is faster.

Pure, deterministic by seed, and no choice is proposed twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schedules.template import Choices, Space, choices_from, text_of

# Half of a batch changes one choice of the best so far; most of what a kernel gains comes from there. A quarter joins
# two good ones, since choices that help apart often help together; the rest looks elsewhere.
NEIGHBOUR_SHARE = 0.5
CROSSING_SHARE = 0.25
GOOD_ONES = 4
RANDOM_ATTEMPTS = 64

ROUNDS = 11
"""Rounds of a duel; a measurement of at least so many rounds is a duel's, and needs no other."""
SMALLEST_GAIN = 0.01
"""Below one percent nothing is gained, however steady the measurement."""


def divide_trials(weights: Sequence[float], trials: int, limits: Sequence[int]) -> list[int]:
    """``trials`` divided in proportion to ``weights``, none above its limit; what one cannot use goes to the others.

    Weights are shares of the time, since a second is gained where seconds are spent. Every kernel gets at least one
    trial, that of its default, even if this makes the sum larger than ``trials``.
    """
    shares = [min(1, limit) for limit in limits]
    left = trials - sum(shares)
    while left > 0:
        open_ones = [i for i, limit in enumerate(limits) if shares[i] < limit and weights[i] > 0]
        if not open_ones:
            break
        total = sum(weights[i] for i in open_ones)
        wanted = {i: left * weights[i] / total for i in open_ones}
        given = {i: min(int(wanted[i]), limits[i] - shares[i]) for i in open_ones}
        if not any(given.values()):
            # Fewer trials are left than kernels: one each, to the largest remainder first.
            for i in sorted(open_ones, key=lambda i: (-wanted[i], i))[:left]:
                given[i] = 1
        for i, count in given.items():
            shares[i] += count
            left -= count
    return shares


def propose(space: Space, history: Mapping[str, float | None], count: int, seed: int = 0) -> list[Choices]:
    """Up to ``count`` choices to measure, none of which is in ``history``; fewer only where the space is exhausted.

    ``history`` maps the text of choices (`text_of`) to seconds, or to None for what failed or is being measured. The
    cost rule's choices come first, then a mix of neighbours of the best, crossings of good ones and random ones. The
    same space, history and seed give the same proposals.
    """
    generator = random.Random(f"{seed} {len(history)}")  # noqa: S311  (nothing secret depends on it)
    proposed: dict[str, Choices] = {}

    def take(choices: Choices) -> bool:
        text = text_of(choices)
        if text in history or text in proposed or len(proposed) >= count or not space.contains(choices):
            return False
        proposed[text] = choices
        return True

    take(space.default)
    good = _best(space, history)
    neighbours = round(count * NEIGHBOUR_SHARE) if good else 0
    for choices in _neighbours(space, good, generator):
        if len(proposed) >= neighbours:
            break
        take(choices)
    crossings = round(count * CROSSING_SHARE) if len(good) > 1 else 0
    for _ in range(crossings * 4):
        if len(proposed) >= neighbours + crossings:
            break
        take(_crossing(good, generator))
    for _ in range(RANDOM_ATTEMPTS * count):
        if len(proposed) >= count:
            break
        take({name: generator.choice(values) for name, values in space.axes.items()})
    if len(proposed) < count:
        for choices in space.all_choices():  # few are left: chance would hardly find them
            take(choices)
    return list(proposed.values())


def _best(space: Space, history: Mapping[str, float | None]) -> list[Choices]:
    """The fastest measured choices that are still in the space, the best first."""
    measured = sorted((seconds, text) for text, seconds in history.items() if seconds is not None)
    known = (choices_from(text) for _, text in measured)
    return [choices for choices in known if space.contains(choices)][:GOOD_ONES]


def _neighbours(space: Space, good: Sequence[Choices], generator: random.Random) -> Iterator[Choices]:
    """Every change of one choice, of the best first; values next to the present one before others, else by chance."""
    for choices in good:
        changes = [
            (abs(values.index(value) - values.index(choices[name])) > 1, generator.random(), name, value)
            for name, values in space.axes.items()
            for value in values
            if value != choices[name]
        ]
        for _, _, name, value in sorted(changes, key=lambda change: change[:2]):
            yield {**choices, name: value}


def _crossing(good: Sequence[Choices], generator: random.Random) -> Choices:
    """Each choice from one of two good ones."""
    first, second = generator.sample(list(good), 2)
    return {name: generator.choice((first[name], second[name])) for name in first}


@dataclass(frozen=True)
class Verdict:
    """``ratio`` is tuned over default time, the median over rounds; ``noise`` how far rounds are from it."""

    default_seconds: float
    tuned_seconds: float
    ratio: float
    noise: float

    @property
    def is_faster(self) -> bool:
        """Whether the tuned kernel is faster by more than the noise."""
        return self.tuned_seconds < self.default_seconds and self.ratio + max(self.noise, SMALLEST_GAIN) < 1.0


def judge(default_rounds: Sequence[float], tuned_rounds: Sequence[float]) -> Verdict:
    """Compare two kernels round by round (seconds): what slows a machine for a while slows both."""
    if len(default_rounds) != len(tuned_rounds) or not default_rounds:
        raise ValueError(f"a duel needs equal rounds, got {len(default_rounds)} and {len(tuned_rounds)}")
    ratios = [tuned / default for default, tuned in zip(default_rounds, tuned_rounds, strict=True)]
    middle = median(ratios)
    noise = median(abs(ratio - middle) for ratio in ratios)
    return Verdict(median(default_rounds), median(tuned_rounds), middle, noise)
