"""Costs of stages that are runs of one topological order, between any two cuts, on classes of identical machines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Floats, Instance


class ClassCosts:
    """K classes of identical machines.

    Attributes:
        members: the machines of each class. counts: (K,) their number. first: (K,) the first machine of each.
        seconds: (n, K) seconds of each piece under contention; infinite if it cannot run there.
        seconds_per_byte: (K + 1, K + 1) from one class to another; infinite if they are not linked. The last row and
            column are the client's.
    """

    def __init__(self, instance: Instance) -> None:
        self.members = instance.classes
        self.counts = np.array([len(members) for members in self.members], dtype=np.intp)
        self.first = np.array([members[0] for members in self.members], dtype=np.intp)
        self.seconds: Floats = instance.seconds[:, self.first] * instance.contention[self.first]
        ends = np.ix_(
            [*self.first.tolist(), instance.client], [*(members[-1] for members in self.members), instance.client]
        )
        self.seconds_per_byte: Floats = np.where(instance.linked[ends], instance.seconds_per_byte[ends], math.inf)


class OrderCosts:
    """Tables of the transfers and sizes of stages along one topological order.

    Row: first cut of a stage; column: its last cut.

    A sent tensor counts once per reader outside the stage, as if all readers were in different stages. With
    ``together``, it counts once.

    Attributes:
        received, sent: (P, P) bytes from and to other stages. from_client, to_client: bytes from and to the client.
        tensors: (P, P) number of tensors that the stage receives and sends.
    """

    def __init__(self, instance: Instance, order: Sequence[int], *, together: bool = False) -> None:
        self.instance = instance
        self.order = np.array(order, dtype=np.intp)
        length = len(order)
        place = np.empty(length, dtype=np.intp)
        place[self.order] = np.arange(length)
        shape = (length + 1, length + 1)
        self.received, self.sent, self.from_client, self.to_client, self.tensors = (np.zeros(shape) for _ in range(5))
        for tensor in instance.tensors:
            ends = sorted(int(place[piece]) for piece in tensor.destinations if piece != instance.client)
            source = -1 if tensor.source == instance.client else int(place[tensor.source])
            into = self.from_client if source < 0 else self.received
            # Stages that begin after the source and after the previous reader, and that contain this reader.
            for before, end in zip([source, *ends], ends, strict=False):
                for table, value in ((into, tensor.bytes), (self.tensors, 1.0)):
                    _rectangle(table, before + 1, end + 1, end + 1, length + 1, value)
            if source < 0:
                continue
            for end in ends[-1:] if together else ends:
                _rectangle(self.sent, 0, source + 1, source + 1, end + 1, tensor.bytes)
                _rectangle(self.tensors, 0, source + 1, source + 1, end + 1, 1.0)
            if instance.client in tensor.destinations:
                for table, value in ((self.to_client, tensor.bytes), (self.tensors, 1.0)):
                    _rectangle(table, 0, source + 1, source + 1, length + 1, value)
        for table in (self.received, self.sent, self.from_client, self.to_client, self.tensors):
            np.cumsum(np.cumsum(table, axis=0, out=table), axis=1, out=table)
            table[table < 1e-9 * table.max(initial=0.0)] = 0.0  # rounding errors of the differences
        self.bytes = self.received + self.sent + self.from_client + self.to_client
        self.weights = np.concatenate([[0.0], np.cumsum(instance.weights[self.order])])
        self.activations = instance.activations[self.order]

    def held(self, start: int, end: int) -> Floats:
        """Return the bytes of memory of stages from the cut ``start`` to start + 1 … end."""
        columns = slice(start + 1, end + 1)
        weights = self.weights[columns] - self.weights[start]
        largest = np.maximum.accumulate(self.activations[start:end])
        return np.asarray(weights + largest + self.instance.problem.buffers * self.bytes[start, columns])


def _rectangle(table: Floats, top: int, bottom: int, left: int, right: int, value: float) -> None:
    """Add a value to rows top … bottom − 1 and columns left … right − 1, as differences for later cumulative sums."""
    size = len(table)
    table[top, left] += value
    if bottom < size:
        table[bottom, left] -= value
    if right < size:
        table[top, right] -= value
        if bottom < size:
            table[bottom, right] += value


class Stretches:
    """Compute times of runs of pieces in one order of P − 1 pieces.

    Args:
        seconds: (P − 1, K) seconds of each piece on every class of machines; infinite where it cannot run.

    Attributes:
        prefix: (K, P) seconds of all pieces before a cut that the class can run.
    """

    def __init__(self, seconds: Floats) -> None:
        blocked = np.isinf(seconds.T)
        kinds, length = blocked.shape
        start = np.zeros((kinds, 1))
        self.prefix: Floats = np.concatenate([start, np.cumsum(np.where(blocked, 0.0, seconds.T), axis=1)], axis=1)
        # The first cut, at or after each cut, whose next piece cannot run; the last cut if there is none.
        ends = np.concatenate([np.where(blocked, np.arange(length), length), np.full((kinds, 1), length)], axis=1)
        self._ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]

    def end(self, kind: int, start: int, period: float) -> int:
        """Return the last cut up to which all pieces from ``start`` compute within the period on one class."""
        limit = self.prefix[kind, start] + period * (1 + 1e-12)
        return int(min(np.searchsorted(self.prefix[kind], limit, side="right") - 1, self._ends[kind, start]))

    def reach(self, period: float) -> npt.NDArray[np.intp]:
        """Return (K, P): for each cut, the last cut up to which all pieces between them compute within the period."""
        limit = period * (1 + 1e-12)
        longest = np.stack([np.searchsorted(prefix, prefix + limit, side="right") - 1 for prefix in self.prefix])
        return np.asarray(np.minimum(longest, self._ends), dtype=np.intp)
