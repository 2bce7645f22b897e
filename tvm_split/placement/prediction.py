"""The prediction of a plan, with its lower bound and the plans that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from rpc_runtime.program.routes import CLIENT
from tvm_split.placement.problem import Amount, CoresLoad, Share, Stage, Timed
from tvm_split.placement.profile import Corrections
from tvm_split.placement.step_graph import Transfer


@dataclass(frozen=True)
class MachinePrediction:
    """The prediction for one machine, per micro-batch, while the pipeline is full; with replicas, on average.

    ``compute_seconds`` includes contention on a shared host, and ``transfer_seconds``, the time to serialise tensors;
    ``alone_seconds`` is the computing for one input alone. ``memory_limit_bytes`` is None if there is no limit.
    ``estimated_share`` is the share of the computing that was not measured. ``cores`` is the number of cores that the
    machine computes on.
    """

    machine: str
    compute_seconds: Amount
    alone_seconds: Amount
    receive_seconds: Amount
    send_seconds: Amount
    weight_bytes: Amount
    activation_bytes: Amount
    buffer_bytes: Amount
    memory_limit_bytes: Amount | None
    estimated_share: Amount
    transfer_seconds: Amount = 0.0
    cores: Annotated[int, Field(ge=0)] = 1

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes


@dataclass(frozen=True)
class StepPrediction:
    """The seconds of a step on each of its machines for one micro-batch.

    ``compute_seconds`` are those in a stream, with contention and ``transfer_seconds``, the time to serialise tensors;
    ``alone_seconds`` are those of one input alone.
    """

    name: str
    stage: str
    machines: tuple[str, ...]
    shares: tuple[Share, ...]
    compute_seconds: tuple[Amount, ...]
    alone_seconds: tuple[Amount, ...]
    transfer_seconds: tuple[Amount, ...]


@dataclass(frozen=True)
class LinkPrediction:
    """Transfers over one link per micro-batch: ``seconds`` for a single one, ``stream_seconds`` within a stream.

    With replicas, ``bytes`` and ``stream_seconds`` are averages over the stream, and ``seconds`` those of a micro-batch
    that uses this link. ``transport`` is the one with which the link was measured; empty if it was not measured.
    """

    source: str
    destination: str
    bytes: Amount
    seconds: Amount
    stream_seconds: Amount
    transport: str = ""


@dataclass(frozen=True)
class ComparedPlan:
    """A baseline, or an alternative plan. ``stages`` are (machine, number of layers); ``why`` says why it lost."""

    name: str
    stages: tuple[tuple[str, int], ...]
    period_seconds: Amount
    latency_seconds: Amount
    why: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        stages: Sequence[Stage],
        plan: Timed,
        why: str = "",
        layer_counts: Mapping[str, int] = MappingProxyType({}),
    ) -> ComparedPlan:
        """Return ``plan`` for comparison; ``layer_counts`` has each piece's number of layers, for stages of pieces."""
        counted = tuple(
            ("+".join(stage.machines), sum(layer_counts.get(layer, 1) for layer in stage.layers)) for stage in stages
        )
        return cls(name, counted, plan.period_seconds, plan.latency_seconds, why)


@dataclass(frozen=True)
class Prediction:
    """The predicted performance of a plan, with a lower bound and the plans that it was compared with.

    Attributes:
        period_seconds: time between two results of a stream; throughput is its inverse.
        latency_seconds: time of one micro-batch alone.
        bubble: share of the machines' time in which they wait, once the pipeline is full.
        in_flight: micro-batches in flight in a stream: latency / period, rounded up, fill the pipeline, and one more
            waits at each machine, so that no machine waits for a late neighbour.
        lower_bound_seconds: no plan has a smaller period (latency, for that objective).
        gap: optimality gap, (value - lower bound) / value; 0 is proven optimal.
        limiting: the machine, link or cores that set the period.
        method: how the plan and the lower bound were found.
        why_no_more_machines: why idle machines stay idle; empty if none is.
        profiled_at: time of the oldest measurement, in seconds since 1970; profiled_until: that of the last machine or
            link to be measured, 0 if it is not known.
        baselines: plans by simple rules, best first; alternatives: the best plans that were not chosen.
        corrections: corrections of the profile, included in all these numbers; empty if no run has corrected it.
        doubts: messages about measurements that contradict each other.
        shared_cores: cores that several machines of the plan, or one and the client, compute on.
        steps: what machines compute without waiting for each other, in topological order.
        transfers: the tensors that pass between these steps and the client, in bytes without codecs.
    """

    period_seconds: Amount
    latency_seconds: Amount
    bubble: Amount
    in_flight: Annotated[int, Field(ge=1)]
    lower_bound_seconds: Amount
    gap: Amount
    limiting: str
    method: str
    why_no_more_machines: str
    profiled_at: Amount
    machines: tuple[MachinePrediction, ...]
    links: tuple[LinkPrediction, ...]
    baselines: tuple[ComparedPlan, ...] = ()
    alternatives: tuple[ComparedPlan, ...] = ()
    corrections: Corrections = field(default_factory=Corrections)
    doubts: tuple[str, ...] = ()
    shared_cores: tuple[CoresLoad, ...] = ()
    steps: tuple[StepPrediction, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    profiled_until: Amount = 0.0

    def __post_init__(self) -> None:
        place = {step.name: number for number, step in enumerate(self.steps)}
        if len(place) < len(self.steps):
            raise ValueError("two steps have the same name")
        machine_names = {machine.machine for machine in self.machines}
        for step in self.steps:
            _check_step(step, machine_names)
        sources: dict[str, str] = {}
        for transfer in self.transfers:
            _check_order(transfer, place)
            if sources.setdefault(transfer.tensor, transfer.source) != transfer.source:
                raise ValueError(f"{transfer.tensor} is made by {sources[transfer.tensor]} and by {transfer.source}")

    @property
    def micro_batches_per_second(self) -> float:
        """Micro-batches per second."""
        return 1.0 / self.period_seconds if self.period_seconds > 0 else math.inf


def _check_step(step: StepPrediction, machines: Container[str]) -> None:
    for values in (step.shares, step.compute_seconds, step.alone_seconds, step.transfer_seconds):
        if not step.machines or len(values) != len(step.machines):
            raise ValueError(f"step {step.name!r} has not one value for each of its machines")
    unknown = next((name for name in step.machines if name not in machines), None)
    if unknown is not None:
        raise ValueError(f"nothing is predicted of machine {unknown!r}")


def _check_order(transfer: Transfer, place: Mapping[str, int]) -> None:
    """Raise a `ValueError` unless the targets come after the source; ``place`` has the positions of steps."""
    source = -1 if transfer.source == CLIENT else place.get(transfer.source, len(place))
    targets = [place.get(name, -1) for name in transfer.targets] or [len(place)]
    wrong = next((number for number, target in enumerate(targets) if source >= target), None)
    if wrong is not None:
        name = transfer.targets[wrong] if transfer.targets else CLIENT
        raise ValueError(f"{transfer.tensor} goes from {transfer.source} to {name}, which does not follow it")
