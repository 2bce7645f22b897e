"""A predicted number beside the measured one, and what a report says of a machine and of a link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, computed_field

from tvm_split.planner.problem import Amount

WIDEST_RANGE = 3.0
"""From end to end; that a time lies in a wider range is no news, and no ratio of 1."""


@dataclass(frozen=True)
class Comparison:
    """None where nothing was predicted, or measured.

    Where ``predicted_least`` is given, anything from there to ``predicted`` is as predicted; ``ratio`` and
    ``difference`` are to the nearer end.
    """

    predicted: Amount | None
    measured: Amount | None
    predicted_least: Amount | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float | None:
        """Measured by predicted; None where one of them is missing, nothing was expected, or it is `inconclusive`."""
        if self.measured is None or not self._nearest or self.inconclusive:
            return None
        return self.measured / self._nearest

    @property
    def difference(self) -> float:
        """Measured less predicted, 0 where one of them is missing."""
        if self.measured is None or self._nearest is None:
            return 0.0
        return self.measured - self._nearest

    @property
    def inconclusive(self) -> bool:
        """Whether the prediction is a range wider than `WIDEST_RANGE` and what was measured lies in it."""
        if self.predicted is None or self.predicted_least is None or self.difference != 0:
            return False
        return self.predicted > WIDEST_RANGE * self.predicted_least

    @property
    def spread(self) -> float:
        """How wide the prediction is as a range."""
        return (self.predicted or 0.0) - self.predicted_least if self.predicted_least is not None else 0.0

    @property
    def _nearest(self) -> float | None:
        if self.measured is None or self.predicted is None or self.predicted_least is None:
            return self.predicted
        return min(max(self.measured, self.predicted_least), self.predicted)


@dataclass(frozen=True)
class MachineReport:
    """A machine's stages together, in seconds per micro-batch (medians over the ``micro_batches`` that it computed).

    ``shares`` of the micro-batches are computed here, one for each of the ``stages``; below 1 where replicas take
    turns. Seconds are then those of a micro-batch of the whole stream, on average: a half of what one takes here, if
    every second one is computed here. ``compute`` is predicted as a range: what serialising takes from the cores falls
    into it as far as the machine has no pauses for that, and waiting for a core where several machines share too few.
    """

    machine: str
    stages: tuple[str, ...]
    shares: tuple[float, ...]
    micro_batches: int
    compute: Annotated[Comparison, Field(alias="compute_seconds")]
    receive: Annotated[Comparison, Field(alias="receive_seconds")]
    send: Annotated[Comparison, Field(alias="send_seconds")]


@dataclass(frozen=True)
class LinkReport:
    """A one-way link, or the way from or to the client: bytes per micro-batch, and seconds on the wire.

    Where replicas take turns, both are averages over the micro-batches of the whole stream. The measured seconds are
    the longer of what its two ends saw. They are None where a stage sends a micro-batch to, or receives it from,
    several machines, so that nobody can tell which of them its time is to be booked on; the measured bytes then are the
    tensors' own. ``codecs`` are those in which tensors cross. ``transport`` is what
    carried it, ``"grpc"``, ``"shm"``, ``"mpi"`` or ``"nccl"``; empty if that was not noted.
    """

    source: str
    destination: str
    bytes: Comparison
    seconds: Comparison
    transport: str = ""
    codecs: tuple[str, ...] = ()
