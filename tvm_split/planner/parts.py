"""What a plan comes to whose machines compute stages together: parts on machines, and the tensors between them.

A part is what one machine computes without waiting for another in between: a stage, or of a shared stage what it does
between two exchanges. Numbers only. Parts stand in topological order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_split.planner.problem import Amount
from tvm_split.planner.profile import Origin


@dataclass(frozen=True)
class Part:
    """What a machine computes of a stage of the plan between two exchanges.

    ``seconds`` are those of one micro-batch by itself, ``together_seconds`` those while the others of the same host
    that share the stage compute, too. ``origin`` is ``"measured"`` where it was timed in its own shape; estimates are
    made from its layers' times and its share of their work.
    """

    name: str
    stage: str
    machine: str
    seconds: float
    together_seconds: float
    origin: Origin = "estimated"
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class PartPrediction:
    """What a part takes of its machine, per micro-batch.

    ``compute_seconds`` are those in a stream, where others compute and tensors are serialised, the latter being
    ``transfer_seconds``; ``alone_seconds`` those of one input alone.
    """

    name: str
    stage: str
    machine: str
    compute_seconds: Amount
    alone_seconds: Amount
    transfer_seconds: Amount = 0.0


@dataclass(frozen=True)
class Delivery:
    """A tensor that goes from a part, or ``"client"``, to those parts of one machine that take it, or to the client.

    Without ``takers`` it goes to the client. Between parts of one machine nothing crosses, but one waits for the other.
    """

    tensor: str
    source: str
    takers: tuple[str, ...]
    bytes: Amount


@dataclass(frozen=True)
class PlanParts:
    """All parts of a plan, and all that passes between them."""

    parts: tuple[Part, ...]
    deliveries: tuple[Delivery, ...]
