"""A lower bound on the period where every stage is a stretch of the one order that the pieces can run in.

With a value u for each piece, a machine that may take ``period`` covers at most the stretch of the greatest value that
it can compute in that time. If all machines together cover less than all pieces are worth, no plan of several machines
has this period, whatever the values. The best values come from the linear program that covers pieces with stretches, a
machine having one (configurations, as in cutting stock: Gilmore and Gomory 1961); like machines may be put together for
it, since the bound is computed anew with the values that it gives, for all machines as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Floats
from tvm_split.planner.search.prices import Prices
from tvm_split.planner.search.stretches import Stretches

KINDS = (32, 16, 8, 4)
"""Of machines in the linear program, as many as there is time for; those of about the same speed are put together."""
ENTRIES_A_SECOND = 150_000
"""Of the linear program's matrix."""
NEAR = 1e-4


def stretch_bound(seconds: Floats, counts: Floats, period: float, time_limit_seconds: float) -> Prices | None:
    """The bound by values that are best for plans of about ``period``; None if there is no time to find any.

    A machine's price is the most that it can take, per second of that period.

    Args:
        seconds: (n, K) of each piece, in their order, on a machine of each kind; infinite where it cannot run.
        counts: (K,) machines of each kind.
    """
    programs = (_program(*_merged(seconds, counts, kinds), period) for kinds in KINDS)
    affordable = (each for each in programs if len(each.rows) <= ENTRIES_A_SECOND * time_limit_seconds)
    values = next((each.values(time_limit_seconds) for each in affordable), None)
    if values is None or not values.sum() > 0:
        return None
    stretches = Stretches(seconds)
    worth = np.concatenate([[0.0], np.cumsum(values)])

    def most(tried: float) -> Floats:
        return np.asarray((worth[stretches.reach(tried)] - worth[None, :]).max(axis=1), dtype=np.float64)

    low, high = 0.0, 2 * period
    while high - low > NEAR * period:
        middle = (low + high) / 2
        proven = counts @ most(middle) < worth[-1] * (1 - 1e-9)
        low, high = (middle, high) if proven else (low, middle)
    return Prices(most(low) / period, values, low)


def _merged(seconds: Floats, counts: Floats, kinds: int) -> tuple[Floats, Floats]:
    if len(counts) <= kinds:
        return seconds, counts
    whole = np.where(np.isfinite(seconds), seconds, 0.0).sum(axis=0)
    groups = np.array_split(np.argsort(whole, kind="stable"), kinds)
    means = np.stack([seconds[:, group].mean(axis=1) for group in groups], axis=1)
    return means, np.array([counts[group].sum() for group in groups])


@dataclass(frozen=True)
class _Program:
    """Covers every piece with stretches, by as few machines as possible, as a share of all.

    A column is a stretch of a kind that is in no longer one; ``first`` (C + 1,) is where its ``rows`` begin: the pieces
    that it has, and then that of its kind.
    """

    first: npt.NDArray[np.intp]
    rows: npt.NDArray[np.intp]
    length: int
    counts: Floats

    def values(self, time_limit_seconds: float) -> Floats | None:
        """The duals of the pieces."""
        length, kinds, columns = self.length, len(self.counts), len(self.first)  # the last is the share of machines
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, length + kinds
        model.col_cost_ = np.concatenate([np.zeros(columns - 1), [1.0]])
        model.col_lower_, model.col_upper_ = np.zeros(columns), np.full(columns, math.inf)
        model.row_lower_ = np.concatenate([np.ones(length), np.full(kinds, -math.inf)])
        model.row_upper_ = np.concatenate([np.full(length, math.inf), np.zeros(kinds)])
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = np.concatenate([self.first, [self.first[-1] + kinds]]).astype(np.int32)
        model.a_matrix_.index_ = np.concatenate([self.rows, np.arange(length, length + kinds)]).astype(np.int32)
        model.a_matrix_.value_ = np.concatenate([np.ones(len(self.rows)), -self.counts])
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        # Values near the best are as good: the interior point method finds them sooner than vertices are found.
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("solver", "ipm"),
            ("run_crossover", "off"),
            ("time_limit", max(time_limit_seconds, 0.01)),
        ):
            solver.setOptionValue(option, value)
        solver.passModel(model)
        solver.run()
        duals = np.array(solver.getSolution().row_dual)
        return np.maximum(duals[:length], 0.0) if len(duals) == length + kinds else None


def _program(seconds: Floats, counts: Floats, period: float) -> _Program:
    longest = Stretches(seconds).reach(period)
    length = len(seconds)
    kind, start = np.nonzero(longest[:, :-1] > np.arange(length))
    end = longest[kind, start]
    inside = np.concatenate([[False], (kind[1:] == kind[:-1]) & (end[1:] == end[:-1])])[: len(kind)]
    kind, start, end = kind[~inside], start[~inside], end[~inside]
    sizes = end - start + 1
    first = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.repeat(start - first[:-1], sizes) + np.arange(first[-1])
    rows[first[1:] - 1] = length + kind
    return _Program(first, rows, length, counts)
