"""What a deployment is, and what was predicted of it: shown beside what is observed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.program import Program
from rpc_runtime.wire.framing import cleaned
from rpc_runtime.wire.messages import MAXIMUM_ABOUT_BYTES
from tvm_split import values
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Amount

Name = Annotated[str, AfterValidator(cleaned)]
"""A name, safe in a terminal when it is read."""


@dataclass(frozen=True)
class AboutStage:
    """A stage on a machine, with the names of its layers; a replica or shard is one of its own."""

    name: Name
    machine: Name
    layers: tuple[Name, ...] = ()


@dataclass(frozen=True)
class AboutLink:
    """One direction of a link, with the predicted seconds of a micro-batch's transfers in a stream."""

    source: Name
    destination: Name
    seconds: Amount


@dataclass(frozen=True)
class About:
    """The stages of a deployment, and the prediction of its plan, if it has one.

    ``compute_seconds`` are those of each machine per micro-batch of a stream.
    """

    stages: tuple[AboutStage, ...] = ()
    period_seconds: Amount | None = None
    latency_seconds: Amount | None = None
    compute_seconds: Mapping[Name, Amount] = field(default_factory=dict)
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


def text_of(about: About) -> bytes:
    """Return the JSON for the workers, without the names of layers, or without all stages, if it would be too long."""
    nameless = replace(about, stages=tuple(replace(stage, layers=()) for stage in about.stages))
    texts = (json.dumps(values.content_of(less)).encode() for less in (about, nameless, replace(about, stages=())))
    return next((text for text in texts if len(text) <= MAXIMUM_ABOUT_BYTES), b"")


def about_in(texts: Iterable[bytes]) -> About:
    """Return what workers were told about a deployment: the first one's text that is valid; all got the same.

    Raises:
        ProtocolError: all texts are invalid; says what is wrong with the first one.
    """
    errors = []
    for text in filter(None, texts):
        try:
            content = json.loads(text)
            return values.Document("what a worker says about the deployment", content, ProtocolError).value(About)
        except (ValueError, RecursionError, ProtocolError) as error:
            errors.append(error)
    if errors:
        raise ProtocolError(f"{errors[0]}")
    return About()
