"""What the time of each machine is worth: a lower bound on the period that needs no linear program.

The dual of dividing every piece over machines at will (`milp.period_bound`): for prices y of the machines' time that
add up to 1, no plan of several machines has a period below Σ over pieces of the least of y · seconds. Where each piece
takes all machines in the same proportion, prices by speed give the relaxation's own value at once; elsewhere they are
moved towards machines that the pieces crowd on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tvm_split.planner.search.instance import Floats

STEPS = 60
SHARPNESS = (8.0, 400.0)
"""How strictly a piece goes where it is cheapest, in the first step and in the last."""
SHORTEST = 1e-100
"""Seconds, for pieces that take none."""
LEAST = 1e-9
"""Share of the highest price that no price is below."""


@dataclass(frozen=True)
class Prices:
    """Of a second of one machine of each kind, and of each piece; ``bound`` is the sum over pieces, in seconds."""

    kinds: Floats
    pieces: Floats
    bound: float


def fair_prices(seconds: Floats, counts: Floats, deadline: float) -> Prices:
    """The best prices found until the deadline (monotonic).

    Args:
        seconds: (n, K) of each piece on a machine of each kind, contention included; infinite where it cannot run.
        counts: (K,) machines of each kind.
    """
    usable = np.isfinite(seconds)
    seconds = np.where(usable, np.maximum(seconds, SHORTEST), np.inf)
    typical = np.where(usable.any(axis=1), np.min(seconds, axis=1), 1.0)
    rates = np.array([_rate(column, typical) for column in seconds.T])
    rates = np.maximum(rates, LEAST * rates.max())
    prices = rates / (counts @ rates)
    best = _prices(seconds, prices)
    sharpness = SHARPNESS[0]
    growth = (SHARPNESS[1] / SHARPNESS[0]) ** (1 / STEPS)
    for _ in range(STEPS):
        if time.monotonic() > deadline or len(counts) == 1:
            break
        costs = seconds * prices
        drawn = counts * (costs / costs.min(axis=1, keepdims=True)) ** -sharpness
        drawn /= drawn.sum(axis=1, keepdims=True)
        load = np.where(usable, drawn * np.where(usable, seconds, 0.0), 0.0).sum(axis=0) / counts
        prices = prices * np.clip(load / (load @ counts * prices.sum()), 1e-2, 1e2) ** (1.0 / sharpness)
        prices = np.maximum(prices, LEAST * prices.max())
        prices /= counts @ prices
        found = _prices(seconds, prices)
        if found.bound > best.bound:
            best = found
        sharpness *= growth
    return best


def _rate(column: Floats, typical: Floats) -> float:
    able = np.isfinite(column)
    work = float(typical[able].sum())
    return work / float(column[able].sum()) if able.any() and work > 0 else LEAST


def _prices(seconds: Floats, prices: Floats) -> Prices:
    pieces = np.min(seconds * prices, axis=1)
    added = len(pieces) * SHORTEST  # at most, since no price is above 1
    return Prices(prices, pieces, max(float(pieces.sum()) - added, 0.0))
