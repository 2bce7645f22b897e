"""The decisions of a tuning run: trials per kernel, which choices to measure next, whether a kernel is faster.

All functions are pure and deterministic for a seed. No choice is proposed twice.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schedules.template import Choices, Space, choices_from, text_of

# Half of a batch changes one choice of the best so far; most of a kernel's gain comes from these. A quarter combines
# two good candidates, because choices that help separately often help together. The rest is random.
NEIGHBOUR_SHARE = 0.5
CROSSOVER_SHARE = 0.25
GOOD_ONES = 4
RANDOM_ATTEMPTS = 64

ROUNDS = 11
"""Rounds of a duel: in each, the default and its challengers run in turn, on one device.

A kernel that was measured in at least this many rounds has been in a duel, which is not repeated.
"""
SMALLEST_GAIN = 0.01
"""A gain below one percent does not count, however steady the measurement is."""


def divide_trials(weights: Sequence[float], trials: int, limits: Sequence[int]) -> list[int]:
    """Return each kernel's number of trials, in proportion to its weight, up to its limit; others get what it leaves.

    Weights are shares of the time, because seconds can be saved where they are spent. Every kernel gets at least one
    trial, for its default, even if the sum then exceeds ``trials``.
    """
    shares = [min(1, limit) for limit in limits]
    remaining = trials - sum(shares)
    while remaining > 0:
        open_ones = [i for i, limit in enumerate(limits) if shares[i] < limit and weights[i] > 0]
        if not open_ones:
            break
        total = sum(weights[i] for i in open_ones)
        quotas = {i: remaining * weights[i] / total for i in open_ones}
        increments = {i: min(int(quotas[i]), limits[i] - shares[i]) for i in open_ones}
        if not any(increments.values()):
            # If fewer trials than kernels are left, give one each to the largest remainders.
            for i in sorted(open_ones, key=lambda i: (-quotas[i], i))[:remaining]:
                increments[i] = 1
        for i, count in increments.items():
            shares[i] += count
            remaining -= count
    return shares


def propose(space: Space, history: Mapping[str, float | None], count: int, seed: int = 0) -> list[Choices]:
    """Return ``count`` choices to measure that are not in ``history``; fewer only if the space is exhausted.

    ``history`` maps the text of choices (`text_of`) to seconds, or to None if they failed or are being measured. The
    cost rule's choices come first, then a mix of neighbours of the best, combinations of good ones and random ones. The
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

    def take_until(most: int, candidates: Iterator[Choices]) -> None:
        while len(proposed) < most and (choices := next(candidates, None)) is not None:
            take(choices)

    take(space.default)
    good = _best(space, history)
    neighbours = round(count * NEIGHBOUR_SHARE) if good else 0
    take_until(neighbours, _neighbours(space, good, generator))
    crossovers = round(count * CROSSOVER_SHARE) if len(good) > 1 else 0
    take_until(neighbours + crossovers, (_crossover(good, generator) for _ in range(crossovers * 4)))
    axes = space.axes.items()
    picks = ({name: generator.choice(values) for name, values in axes} for _ in range(RANDOM_ATTEMPTS * count))
    take_until(count, picks)
    take_until(count, space.all_choices())  # few are left, so random picks would miss them
    return list(proposed.values())


def _best(space: Space, history: Mapping[str, float | None]) -> list[Choices]:
    """Return the fastest measured choices that are still in the space, the best first."""
    measured = sorted((seconds, text) for text, seconds in history.items() if seconds is not None)
    candidates = (choices_from(text) for _, text in measured)
    return [choices for choices in candidates if space.contains(choices)][:GOOD_ONES]


def _neighbours(space: Space, good: Sequence[Choices], generator: random.Random) -> Iterator[Choices]:
    """Yield every change of one choice of the ``good`` candidates in order: to adjacent values, then to random ones."""
    for choices in good:
        changes = [
            (abs(values.index(value) - values.index(choices[name])) > 1, generator.random(), name, value)
            for name, values in space.axes.items()
            for value in values
            if value != choices[name]
        ]
        for _, _, name, value in sorted(changes, key=lambda change: change[:2]):
            yield {**choices, name: value}


def _crossover(good: Sequence[Choices], generator: random.Random) -> Choices:
    """Return a combination of two good candidates: each choice comes from one of them."""
    first, second = generator.sample(list(good), 2)
    return {name: generator.choice((first[name], second[name])) for name in first}


@dataclass(frozen=True)
class Verdict:
    """The result of a duel.

    ``ratio`` is the median over the rounds of tuned over default time; ``noise`` is the median deviation from it.
    """

    default_seconds: float
    tuned_seconds: float
    ratio: float
    noise: float

    @property
    def is_faster(self) -> bool:
        """Whether the tuned kernel is faster by more than the noise and `SMALLEST_GAIN`."""
        return self.tuned_seconds < self.default_seconds and self.ratio + max(self.noise, SMALLEST_GAIN) < 1.0


def judge(default_rounds: Sequence[float], tuned_rounds: Sequence[float]) -> Verdict:
    """Return the verdict on two kernels from their seconds, compared by round: a slowdown of the machine affects both.

    Raises:
        ValueError: the kernels have different numbers of rounds, or none.
    """
    if len(default_rounds) != len(tuned_rounds) or not default_rounds:
        raise ValueError(
            "both kernels need the same number of rounds, at least one; "
            f"they have {len(default_rounds)} and {len(tuned_rounds)}"
        )
    ratios = [tuned / default for default, tuned in zip(default_rounds, tuned_rounds, strict=True)]
    middle = median(ratios)
    noise = median(abs(ratio - middle) for ratio in ratios)
    return Verdict(median(default_rounds), median(tuned_rounds), middle, noise)
