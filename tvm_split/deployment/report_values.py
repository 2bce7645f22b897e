"""The values of a deployment report: comparisons of predicted and measured numbers, for machines and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, computed_field

from tvm_split.planner.problem import Amount

WIDEST_RANGE = 3.0
"""Largest ratio of the ends of a predicted range for which a measurement within the range confirms it."""


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured value; None if it was not predicted, or not measured.

    With ``predicted_least`` the prediction is a range from there to ``predicted``; ``ratio`` and ``difference`` are
    then relative to the nearest value in the range.
    """

    predicted: Amount | None
    measured: Amount | None
    predicted_least: Amount | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float | None:
        """Measured by predicted; None if one of them is missing, 0 was predicted, or the range is `inconclusive`."""
        if self.measured is None or not self._nearest or self.inconclusive:
            return None
        return self.measured / self._nearest

    @property
    def difference(self) -> float:
        """Measured minus predicted; 0 if one of them is missing."""
        if self.measured is None or self._nearest is None:
            return 0.0
        return self.measured - self._nearest

    @property
    def inconclusive(self) -> bool:
        """Whether the prediction is a range wider than `WIDEST_RANGE` that contains the measurement."""
        if self.predicted is None or self.predicted_least is None or self.difference != 0:
            return False
        return self.predicted > WIDEST_RANGE * self.predicted_least

    @property
    def spread(self) -> float:
        """The width of the predicted range; 0 if the prediction is a single value."""
        return (self.predicted or 0.0) - self.predicted_least if self.predicted_least is not None else 0.0

    @property
    def _nearest(self) -> float | None:
        if self.measured is None or self.predicted is None or self.predicted_least is None:
            return self.predicted
        return min(max(self.measured, self.predicted_least), self.predicted)


@dataclass(frozen=True)
class MachineReport:
    """The sum over a machine's stages, in seconds per micro-batch (medians over the ``micro_batches`` it computed).

    ``shares`` has, for each of the ``stages``, the share of the micro-batches that this machine computes; below 1 for
    replicas. Seconds are averages per micro-batch of the whole stream: half of the time of one micro-batch on this
    machine, if it computes every second one. ``compute`` is predicted as a range. Its upper end includes serialising,
    which takes compute time unless the machine is idle meanwhile, and waiting for oversubscribed cores.
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
    """A one-way link between machines, or between a machine and the client: bytes and wire seconds per micro-batch.

    With replicas, both are averages over the micro-batches of the whole stream. The measured seconds are those of the
    slower end. They are None if a stage sends a micro-batch to, or receives it from, several machines, because the time
    cannot be divided among the links; the measured bytes are then the size of the tensors. ``codecs`` are those of the
    tensors on the link. ``transport`` is ``"grpc"``, ``"shm"``, ``"mpi"`` or ``"nccl"``; empty if it is not known.
    """

    source: str
    destination: str
    bytes: Comparison
    seconds: Comparison
    transport: str = ""
    codecs: tuple[str, ...] = ()
