"""What a deployment is, and what was predicted of it: shown beside what is observed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.program import Program
from rpc_runtime.wire.messages import MAXIMUM_ABOUT_BYTES
from rpc_runtime.wire.text import cleaned
from tvm_split import values
from tvm_split.placement.problem import Amount

if TYPE_CHECKING:
    from tvm_split.compiler.bundle import Bundle
    from tvm_split.compiler.stage import Kernel

Name = Annotated[str, AfterValidator(cleaned)]
"""A name, safe in a terminal when it is read."""


@dataclass(frozen=True)
class AboutStage:
    """A stage on a machine, with the names of its layers; a replica or shard is one of its own.

    ``kernels`` maps each kernel's function to the layers of its calls, in the order of the calls.
    """

    name: Name
    machine: Name
    layers: tuple[Name, ...] = ()
    kernels: Mapping[Name, tuple[Name, ...]] = field(default_factory=dict)


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

    def layers_of_kernels(self) -> dict[tuple[str, str, str], tuple[str, ...]]:
        """Return `AboutStage.kernels` by machine, stage and function."""
        return {
            (stage.machine, stage.name, function): layers
            for stage in self.stages
            for function, layers in stage.kernels.items()
        }


def about_of(bundle: Bundle, program: Program) -> About:
    """Return what a bundle is whose stages are placed as in ``program``, and what was predicted of just this."""
    from tvm_split.compiler.bundle import kernels_key  # imported here, since it loads TVM

    kernels = {(stage.name, stage.library): bundle.kernels[kernels_key(stage)] for stage in bundle.program.stages}
    stages = tuple(
        AboutStage(stage.name, stage.machine, stage.layers, _layers_by_function(kernels[stage.name, stage.library]))
        for stage in program.stages
    )
    prediction = bundle.plan.prediction
    if prediction is None or program != bundle.program:
        return About(stages)
    return About(
        stages,
        prediction.period_seconds or None,
        prediction.latency_seconds or None,
        {machine.machine: machine.compute_seconds for machine in prediction.machines},
        tuple(AboutLink(link.source, link.destination, link.stream_seconds) for link in prediction.links),
    )


def _layers_by_function(kernels: Iterable[Kernel]) -> dict[str, tuple[str, ...]]:
    layers: dict[str, tuple[str, ...]] = {}
    for kernel in kernels:
        layers[kernel.function] = (*layers.get(kernel.function, ()), ", ".join(kernel.layers))
    return layers


def text_of(about: About) -> bytes:
    """Return a deployment's description as JSON for its workers, with at most `MAXIMUM_ABOUT_BYTES`.

    Until it fits, kernels are left out, then layers too, then all stages; if that does not help, the result is empty.
    """
    coarse = replace(about, stages=tuple(replace(stage, kernels={}) for stage in about.stages))
    nameless = replace(about, stages=tuple(AboutStage(stage.name, stage.machine) for stage in about.stages))
    wanted = (about, coarse, nameless, replace(about, stages=()))
    texts = (json.dumps(values.content_of(one)).encode() for one in wanted)
    return next((text for text in texts if len(text) <= MAXIMUM_ABOUT_BYTES), b"")


def about_in(texts: Iterable[bytes]) -> About:
    """Return the description in the first valid text; each worker of a deployment got the same text.

    Return an empty description if all texts are empty.

    Raises:
        ProtocolError: no text is valid; says what is wrong with the first one.
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
