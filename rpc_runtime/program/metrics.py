"""Metrics for Prometheus, computed from the totals of tracks at each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rpc_runtime.program.events import BLOCK, COMPUTE, FLIGHT, PAUSE, RECEIVE, REPLAY, SEND, WAIT, WINDOW, Measured

DEPLOYMENT_LABELS = ("model", "deployment", "machine")


@dataclass(frozen=True)
class Family:
    """A metric: ``field`` of each track of ``kind``; ``labels`` are in addition to `DEPLOYMENT_LABELS`.

    Prometheus appends ``_total`` to the name of a counter.
    """

    name: str
    help: str
    kind: str
    field: str
    labels: tuple[str, ...]
    is_gauge: bool = False


STAGE, PAIR, LINK = ("stage",), ("stage", "peer"), ("stage", "peer", "tensor")
FAMILIES = (
    Family("tvm_split_stage_micro_batches", "Micro-batches that a stage has computed.", COMPUTE, "events", STAGE),
    Family("tvm_split_stage_compute_seconds", "Seconds of computing.", COMPUTE, "seconds", STAGE),
    Family("tvm_split_stage_wait_seconds", "Seconds idle until an input of the stage arrived.", WAIT, "seconds", PAIR),
    Family(
        "tvm_split_stage_block_seconds", "Seconds idle until an output of the stage had room.", BLOCK, "seconds", PAIR
    ),
    Family("tvm_split_link_sent_bytes", "Encoded bytes sent to the peer.", SEND, "size_bytes", LINK),
    Family("tvm_split_link_received_bytes", "Encoded bytes received from the peer.", RECEIVE, "size_bytes", LINK),
    Family("tvm_split_link_send_seconds", "Seconds in which a tensor was sent.", SEND, "seconds", LINK),
    Family("tvm_split_link_receive_seconds", "Seconds in which a tensor was received.", RECEIVE, "seconds", LINK),
    Family("tvm_split_link_transfers", "Tensors sent to the peer.", SEND, "events", LINK),
    Family(
        "tvm_split_link_under_way", "Sent micro-batches without a credit, after the latest.", SEND, "value", LINK,
        is_gauge=True,
    ),
    Family(
        "tvm_split_link_window", "Micro-batches that may be under way, once widened.", WINDOW, "value", LINK,
        is_gauge=True,
    ),
    Family("tvm_split_results", "Results that the client has got.", FLIGHT, "events", ()),
    Family("tvm_split_flight_seconds", "Seconds from input to result, summed over results.", FLIGHT, "seconds", ()),
    Family("tvm_split_recoveries", "Times that stages went to other machines.", PAUSE, "events", ("peer",)),
    Family("tvm_split_pause_seconds", "Seconds until inputs were fed to other machines.", PAUSE, "seconds", ("peer",)),
    Family("tvm_split_replayed_micro_batches", "Micro-batches that were fed again.", REPLAY, "events", ()),
)  # fmt: skip
"""All metrics of tracks. The documentation lists them."""


def families(measured: Iterable[Measured]) -> list[Metric]:
    """Return the metrics of all deployments and machines; a family without tracks is left out."""
    listed = [*measured]
    weights = GaugeMetricFamily("tvm_split_weight_bytes", "Weights that are loaded.", labels=DEPLOYMENT_LABELS)
    for one in listed:
        weights.add_metric([one.model, one.deployment, one.machine], one.weight_bytes)
    metrics: list[Metric] = [weights] if listed else []
    for family in FAMILIES:
        kind = GaugeMetricFamily if family.is_gauge else CounterMetricFamily
        metric = kind(family.name, family.help, labels=[*DEPLOYMENT_LABELS, *family.labels])
        for one in listed:
            for labels, value in _values(family, one).items():
                metric.add_metric([one.model, one.deployment, one.machine, *labels], value)
        if metric.samples:
            metrics.append(metric)
    return metrics


def _values(family: Family, one: Measured) -> Mapping[tuple[str, ...], float]:
    """Return a metric's values by the values of its labels; tracks with equal labels are summed."""
    values: dict[tuple[str, ...], float] = {}
    for track in one.tracks:
        if track.kind == family.kind:
            labels = tuple(getattr(track, label) for label in family.labels)
            values[labels] = values.get(labels, 0.0) + getattr(track, family.field)
    return values
