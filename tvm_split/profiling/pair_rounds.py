"""Groups pairs of machines into rounds of pairs that can be measured at the same time. Pure function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

PARALLEL_PAIRS = 4


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
