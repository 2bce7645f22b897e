"""How far each kind of machine can go from every cut of an order of pieces, in a given time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Floats


class Stretches:
    """Pieces in an order, of P − 1; ``seconds`` (P − 1, K) of each on every kind of machine, infinite where it cannot.

    Attributes:
        prefix: (K, P) seconds of all pieces before a cut, as far as the kind can run them.
    """

    def __init__(self, seconds: Floats) -> None:
        blocked = np.isinf(seconds.T)
        kinds, length = blocked.shape
        start = np.zeros((kinds, 1))
        self.prefix: Floats = np.concatenate([start, np.cumsum(np.where(blocked, 0.0, seconds.T), axis=1)], axis=1)
        # At or behind each cut, the first one whose next piece is blocked, or the last of all.
        ends = np.concatenate([np.where(blocked, np.arange(length), length), np.full((kinds, 1), length)], axis=1)
        self._ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]

    def reach(self, period: float) -> npt.NDArray[np.intp]:
        """(K, P): the last cut before which everything from a cut on is computed within the period."""
        limit = period * (1 + 1e-12)
        longest = np.stack([np.searchsorted(each, each + limit, side="right") - 1 for each in self.prefix])
        return np.asarray(np.minimum(longest, self._ends), dtype=np.intp)
