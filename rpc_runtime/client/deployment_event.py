"""What happens to a running deployment."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from rpc_runtime.program.program import Program

EventKind = Literal["failure", "recovered", "gave up", "standby lost", "draining", "returned", "moved", "not moved"]


@dataclass(frozen=True)
class DeploymentEvent:
    """Something that happened to a running deployment.

    ``epoch`` counts placements from 1. Of a recovery or a move, ``pause_seconds`` is the time from the failure, or from
    when no more inputs were fed, until inputs were fed again, ``replayed`` the number of micro-batches that were sent
    again, and ``placement`` has the machines of each stage from then on.
    """

    kind: EventKind
    epoch: int
    machine: str = ""
    cause: str = ""
    pause_seconds: float = 0.0
    replayed: int = 0
    placement: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def text(self) -> str:
        """What happened, and why: of an error's text its first sentence, since the others say what to do."""
        again = f" in {self.pause_seconds:.2g} s ({self.replayed} inputs were sent again)" if self.placement else ""
        return f"{self.kind}{again}: {self.cause.partition('. ')[0]}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; the time in ISO 8601."""
        return {**asdict(self), "time": self.time.isoformat()}


def placement_of(program: Program) -> dict[str, tuple[str, ...]]:
    """Return the machines of each stage, by its name."""
    return {name: tuple(stage.machine for stage in replicas) for name, replicas in program.replicas.items()}
