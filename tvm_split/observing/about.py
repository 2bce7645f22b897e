"""What a deployment is, and what was predicted of it: shown beside what is observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rpc_runtime.program.program import Program
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Amount


@dataclass(frozen=True)
class AboutStage:
    """A stage on a machine, with the names of its layers; a replica or shard is one of its own."""

    name: str
    machine: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class AboutLink:
    """One direction of a link, with the predicted seconds of a micro-batch's transfers in a stream."""

    source: str
    destination: str
    seconds: Amount


@dataclass(frozen=True)
class About:
    """The stages of a deployment, and the prediction of its plan, if it has one.

    ``compute_seconds`` are those of each machine per micro-batch of a stream.
    """

    stages: tuple[AboutStage, ...] = ()
    period_seconds: Amount | None = None
    latency_seconds: Amount | None = None
    compute_seconds: Mapping[str, Amount] = field(default_factory=dict)
    links: tuple[AboutLink, ...] = ()


def about_of(program: Program, plan: Plan) -> About:
    """Return what a deployed program is."""
    stages = tuple(AboutStage(stage.name, stage.machine, stage.layers) for stage in program.stages)
    prediction = plan.prediction
    if prediction is None:
        return About(stages)
    return About(
        stages,
        prediction.period_seconds or None,
        prediction.latency_seconds or None,
        {machine.machine: machine.compute_seconds for machine in prediction.machines},
        tuple(AboutLink(link.source, link.destination, link.stream_seconds) for link in prediction.links),
    )
