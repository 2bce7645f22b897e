"""What comes after a stage that is done takes so long at least, if only some kinds of machines have any left."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.ideals import predecessors, successors
from tvm_split.planner.search.instance import Flags, Floats, Instance
from tvm_split.planner.search.latency_bound import LatencyBound

MOST_TABLES = 256
MOST_ENTRIES = 200_000
"""Of all tables; with more, what is left no longer counts."""


class LatencyAhead:
    """Of one instance.

    Args:
        bound: with every machine.
        kinds: (K,) a machine of each kind. lag, slow: (K + 1, K + 1) latency and seconds per byte between different
            machines of two kinds, infinite latency where there is no link; the last is the client.
    """

    def __init__(
        self, instance: Instance, bound: LatencyBound, kinds: npt.NDArray[np.intp], lag: Floats, slow: Floats
    ) -> None:
        self._seconds = instance.seconds[:, kinds]
        self._whole = bound.ahead[:, kinds]
        self._lag, self._slow = lag, slow
        self._readers = successors(predecessors(instance))
        self._sizes: dict[tuple[int, int], float] = {}
        for tensor in instance.tensors:
            for end in tensor.destinations:
                pair = tensor.source, end
                self._sizes[pair] = self._sizes.get(pair, 0.0) + tensor.bytes
        self._client = instance.client
        self._most = min(MOST_TABLES, MOST_ENTRIES // max(1, self._seconds.size))
        self._tables: dict[bytes, Floats] = {}

    def table(self, left: Flags) -> Floats:
        """(n, K) seconds from the end of a stage with a piece on a machine of a kind to the end of everything.

        What follows is on machines of the kinds in ``left``, (K,), and not on the one of the stage.
        """
        key = left.tobytes()
        found = self._tables.get(key)
        if found is None:
            found = self._whole if len(self._tables) >= self._most else self._of(np.flatnonzero(left))
            if len(self._tables) < self._most:
                self._tables[key] = found
        return found

    def _of(self, left: npt.NDArray[np.intp]) -> Floats:
        count = len(self._seconds)
        outside = self._whole.copy()
        inside = self._whole[:, left].copy()  # the same where what follows may stay on the machine
        same = np.eye(len(left), dtype=bool)
        for piece in reversed(range(count)):
            if (piece, self._client) in self._sizes:
                home = self._lag[:-1, -1] + self._sizes[piece, self._client] * self._slow[:-1, -1]
                np.maximum(outside[piece], home, out=outside[piece])
                np.maximum(inside[piece], home[left], out=inside[piece])
            for reader in self._readers[piece]:
                if not len(left):
                    outside[piece] = np.inf
                    continue
                way = self._lag[:-1, left] + self._sizes[piece, reader] * self._slow[:-1, left]
                rest = self._seconds[reader, left] + inside[reader]
                np.maximum(outside[piece], (way + rest).min(axis=1), out=outside[piece])
                stay = np.where(same, 0.0, way[left]) + rest
                np.maximum(inside[piece], stay.min(axis=1), out=inside[piece])
        return outside
