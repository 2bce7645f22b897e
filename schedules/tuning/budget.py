"""How many trials each kernel gets: by its share of the time, since a second is gained where seconds are spent."""

from __future__ import annotations

from collections.abc import Sequence


def divide_trials(weights: Sequence[float], trials: int, limits: Sequence[int]) -> list[int]:
    """``trials`` divided in proportion to ``weights``, none above its limit; what one cannot use goes to the others.

    Every kernel gets at least one trial, that of its default, even if this makes the sum larger than ``trials``.
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
