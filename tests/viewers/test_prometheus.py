"""A real Prometheus scrapes two workers and a client while a stream runs, and has the deployment's sums."""

import numpy as np
import pytest

import tvm_split
from tests.helpers.waiting import eventually
from tests.viewers.lab import Lab, answers


def kinds(address: str) -> set[str]:
    return {answer["metric"]["kind"] for answer in answers(address, "tvm_split_period_seconds")}


def test_sums_are_the_statistics(lab: Lab, bundle: tvm_split.Bundle) -> None:
    x = np.zeros((1, 3, 224, 224), np.float32)
    with tvm_split.deploy(bundle, tvm_split.Cluster.from_yaml(lab.cluster)) as deployment:
        server = deployment.serve_metrics()
        address = lab.prometheus(*lab.metrics, str(server.address))
        eventually(lambda: len(answers(address, "up == 1")) == 3, "all are scraped")
        for _ in deployment.stream([(x,)] * 10):
            pass
        assert answers(address, "tvm_split_stage_micro_batches_total"), "scraped while the stream ran"
        for stage in deployment.stats().stages:
            query = f'max by (machine, stage) (tvm_split_stage_compute_seconds_total{{stage="{stage.name}"}})'

            def value(query: str = query) -> float:
                return max((float(answer["value"][1]) for answer in answers(address, query)), default=0.0)

            eventually(lambda: value() == pytest.approx(stage.compute_seconds), f"the seconds of {stage.name}")  # noqa: B023
        eventually(lambda: kinds(address) == {"predicted", "measured"}, "both periods")
        of_one = 'tvm_split_stage_micro_batches_total{machine="machine-a"}'
        eventually(lambda: len(answers(address, of_one)) == 2, "answers from the worker and from the client")
