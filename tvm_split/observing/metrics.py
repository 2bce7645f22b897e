"""Metrics of a whole deployment, served by its client: those of all machines, and what was predicted beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.events import Measured
from rpc_runtime.program.metrics import families
from tvm_split.observing.recording import Observed

logger = logging.getLogger(__name__)

PERIOD_SECONDS = "tvm_split_period_seconds"
CLOCK_ERROR_SECONDS = "tvm_split_clock_error_seconds"
UP = "tvm_split_machine_up"


def deployment_metrics(
    model: str, name: str, planned: tuple[str, ...], observed: Observed, periods: Callable[[], dict[str, float | None]]
) -> Iterator[Metric]:
    """Yield the metrics of a deployment at this moment. Machines without it, ``planned`` or not, are reported as down.

    ``periods`` returns the seconds between two results of a stream: ``predicted`` and ``measured``, if they are known.
    """
    refused: dict[str, str] = {}
    try:
        seen = observed.observe(refused=refused)
    except TvmSplitError as error:
        logger.warning("there are no metrics of %s: %s", name, error)
        seen = {}
    for reason in refused.values():
        logger.warning("there are no metrics of a machine of %s: %s", name, reason)
    measured = [Measured(model, name, machine, observation.tracks) for machine, observation in seen.items()]
    yield from (metric for metric in families(measured) if metric.name != "tvm_split_weight_bytes")
    labels = ["model", "deployment"]
    period = GaugeMetricFamily(PERIOD_SECONDS, "Seconds between two results of a stream.", labels=[*labels, "kind"])
    for kind, seconds in periods().items():
        if seconds is not None:
            period.add_metric([model, name, kind], seconds)
    clock = GaugeMetricFamily(
        CLOCK_ERROR_SECONDS, "Error of the latest measurement of a machine's clock.", labels=[*labels, "machine"]
    )
    for machine, own in observed.clocks().items():
        latest = own.samples[-1].error_nanoseconds if own.samples else 0
        clock.add_metric([model, name, machine], latest * 1e-9)
    alive = GaugeMetricFamily(UP, "1 if the machine of the deployment answers, else 0.", labels=[*labels, "machine"])
    for machine in dict.fromkeys((*planned, *observed.machines)):
        alive.add_metric([model, name, machine], float(machine in seen))
    yield from (period, clock, alive)
