"""Which choices to measure next: pure, deterministic by seed, and never the same twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from tvm_split.schedules.template import Choices, Space, choices_from, text_of

# Half of a batch changes one choice of the best so far; most of what a kernel gains comes from there. A quarter joins
# two good ones, since choices that help apart often help together; the rest looks elsewhere.
NEIGHBOUR_SHARE = 0.5
CROSSING_SHARE = 0.25
GOOD_ONES = 4
RANDOM_ATTEMPTS = 64


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
    by_text = {text: seconds for text, seconds in history.items() if seconds is not None}
    names = {text: choices for text, choices in _parsed(by_text).items() if space.contains(choices)}
    return [names[text] for text in sorted(names, key=lambda text: (by_text[text], text))[:GOOD_ONES]]


def _parsed(history: Mapping[str, float]) -> dict[str, Choices]:
    return {text: choices_from(text) for text in history}


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
