"""Every query of Grafana's dashboard has an answer of a real Prometheus while a stream runs."""

import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tvm_split
from tests.helpers.waiting import eventually
from tests.viewers.lab import Lab, answers

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tvm-split.json"
INTERVAL = "10s"
"""What Grafana puts in place of $__rate_interval: at least four scrapes."""


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (series,) = re.findall(r"^label_values\((.*), \w+\)$", variable["query"]["query"])
            yield series


def test_every_query_has_data(lab: Lab, bundle: tvm_split.Bundle) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    ended = threading.Event()
    x = np.zeros((1, 3, 224, 224), np.float32)
    with tvm_split.deploy(bundle, tvm_split.Cluster.from_yaml(lab.cluster)) as deployment:
        address = lab.prometheus(*lab.metrics, str(deployment.serve_metrics().address))

        def stream() -> None:
            for _ in deployment.stream(itertools.takewhile(lambda _: not ended.is_set(), itertools.repeat((x,)))):
                pass

        thread = threading.Thread(target=stream)
        thread.start()
        try:
            values = {"$__rate_interval": INTERVAL, "$deployment": ".+", "$model": bundle.model}
            for query in queries(dashboard):
                filled = re.sub(r"\$\w+", lambda match: values[match[0]], query)
                eventually(lambda: answers(address, filled), f"an answer to {filled}")  # noqa: B023
            (share,) = answers(address, 'sum(rate(tvm_split_stage_compute_seconds_total{machine="machine-a"}[10s]))')
        finally:
            ended.set()
            thread.join()
    assert float(share["value"][1]) > 0
