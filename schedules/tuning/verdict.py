"""Whether a tuned kernel is faster than the default, from rounds in which both ran in turn on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ROUNDS = 11
"""Rounds of a duel; a measurement of at least so many rounds is a duel's, and needs no other."""
SMALLEST_GAIN = 0.01
"""Below one percent nothing is gained, however steady the measurement."""


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
