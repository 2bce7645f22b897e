"""Metrics that a deployment's client serves: sums of all machines, and what was predicted beside what was measured."""

import urllib.error
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tvm_split

X = np.ones((1, 4), np.float32)
COUNT = 20


def samples(url: str) -> list[tuple[str, dict[str, str], float]]:
    with urllib.request.urlopen(url, timeout=20) as reply:
        text = reply.read().decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def test_the_sums_are_the_statistics(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster):
    with tvm_split.deploy(bundle, three_workers) as deployment:
        with deployment.serve_metrics() as server:
            for _ in deployment.stream([(X,)] * COUNT):
                pass
            listed = samples(server.url)
            for stage in deployment.stats().stages:
                (own,) = (
                    value
                    for name, labels, value in listed
                    if name == "tvm_split_stage_compute_seconds_total" and labels["stage"] == stage.name
                )
                assert own == pytest.approx(stage.compute_seconds)
            values = {name: value for name, labels, value in listed if labels.get("machine") == "client"}
            assert values["tvm_split_results_total"] == COUNT
            assert values["tvm_split_flight_seconds_total"] > 0
            periods = {labels["kind"]: value for name, labels, value in listed if name == "tvm_split_period_seconds"}
            assert periods["measured"] > 0
            up = {labels["machine"]: value for name, labels, value in listed if name == "tvm_split_machine_up"}
            assert up == {"machine-a": 1, "machine-b": 1}
            url = server.url
        with pytest.raises(urllib.error.URLError):
            samples(url)
        again = deployment.serve_metrics()
        assert samples(again.url)
    with pytest.raises(urllib.error.URLError):
        samples(again.url)


def test_an_address_that_cannot_be_used(bundle: tvm_split.Bundle):
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2)) as deployment:
        with (
            deployment.serve_metrics() as server,
            pytest.raises(tvm_split.WorkerError, match="cannot serve metrics on"),
        ):
            deployment.serve_metrics(str(server.address))
        deployment.run(np.zeros_like(X))
        with deployment.serve_metrics() as server:
            counted = [value for name, _, value in samples(server.url) if name == "tvm_split_stage_micro_batches_total"]
        assert counted == [1, 1]
