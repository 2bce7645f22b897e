"""What a plan is expected to do, and how sure that is: prediction, certificate, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MachinePrediction:
    """One machine, per micro-batch, while the pipeline is full; on average, where replicas take turns.

    ``compute_seconds`` includes what sharing a host and serialising cost, the latter being ``transfer_seconds``;
    ``alone_seconds`` is computing by itself.
    ``memory_limit_bytes`` is None where nothing limits it. ``estimated_share`` is the share of ``alone_seconds`` that
    was not measured.
    """

    machine: str
    compute_seconds: float
    alone_seconds: float
    receive_seconds: float
    send_seconds: float
    weight_bytes: float
    activation_bytes: float
    buffer_bytes: float
    memory_limit_bytes: float | None
    estimated_share: float
    transfer_seconds: float = 0.0

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes


@dataclass(frozen=True)
class LinkPrediction:
    """What crosses one link per micro-batch: ``seconds`` for a single one, ``stream_seconds`` when many follow.

    Where replicas take turns, ``bytes`` and ``stream_seconds`` are averages over the stream, and ``seconds`` those of a
    micro-batch that goes this way.
    """

    source: str
    destination: str
    bytes: float
    seconds: float
    stream_seconds: float


@dataclass(frozen=True)
class ComparedPlan:
    """A baseline, or a plan that lost. ``stages`` as (machine, number of layers); ``why`` it is not chosen."""

    name: str
    stages: tuple[tuple[str, int], ...]
    period_seconds: float
    latency_seconds: float
    why: str = ""


@dataclass(frozen=True)
class Corrections:
    """What runs have said of a profile since it was measured.

    ``compute_ratios`` as (machine, how many times as long as profiled it computes), ``link_speeds`` as (source,
    destination, bytes a second).
    """

    compute_ratios: tuple[tuple[str, float], ...] = ()
    link_speeds: tuple[tuple[str, str, float], ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What is expected of a plan, and its certificate.

    Attributes:
        period_seconds: between two results when many follow each other; throughput is its inverse.
        latency_seconds: of one micro-batch alone.
        bubble: the share of the machines' time in which they wait, once the pipeline is full.
        in_flight: micro-batches under way in a stream: latency / period, rounded up, are as many as the pipeline holds
            when it is full, and one more waits at each machine, so that it need not wait for a late neighbour.
        lower_bound_seconds: no plan has a smaller period (latency, for that objective).
        gap: (value - lower bound) / value; 0 is proven optimal.
        limiting: the machine or link that sets the period.
        method: how the plan was found and proven.
        why_no_more_machines: why idle machines stay idle; empty if none is.
        profiled_at: when the oldest measurement was made, in seconds since 1970.
        baselines: what users would do without a planner, best first; alternatives: the best plans that lost.
        corrections: of the profile, which are in all of these numbers; empty for a plan that no run has improved.
    """

    period_seconds: float
    latency_seconds: float
    bubble: float
    in_flight: int
    lower_bound_seconds: float
    gap: float
    limiting: str
    method: str
    why_no_more_machines: str
    profiled_at: float
    machines: tuple[MachinePrediction, ...]
    links: tuple[LinkPrediction, ...]
    baselines: tuple[ComparedPlan, ...] = ()
    alternatives: tuple[ComparedPlan, ...] = ()
    corrections: Corrections = Corrections()

    @property
    def samples_per_second(self) -> float:
        """Micro-batches a second."""
        return 1.0 / self.period_seconds
