"""The page of a deployment while it runs, and after a machine has gone."""

import json
import os
import signal
import urllib.request

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime.client.worker_client import describe
from tests.helpers.waiting import eventually

X = np.ones((1, 4), np.float32)
NAMES = ("machine-a", "machine-b")


@pytest.fixture(scope="module")
def bundle() -> tvm_split.Bundle:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    model = tvm_split.load_model(network, (torch.ones(1, 4),), name="net")
    plan = tvm_split.plan(
        model, tvm_split.Cluster.local(2), split={"machine-a": ["0"], "machine-b": ["2"]}, estimate=True
    )
    return tvm_split.compile(model, plan, verify=False)


def page_at(url):
    with urllib.request.urlopen(f"{url}page.json", timeout=30) as reply:
        return json.loads(reply.read())


def test_a_deployment_and_the_loss_of_a_machine(bundle):
    with tvm_split.Cluster.local(2) as cluster, tvm_split.deploy(bundle, cluster) as deployment:
        server = deployment.dashboard()
        assert page_at(server.url)["state"] == "idle"
        for _ in deployment.stream([(X,)] * 50):
            pass
        eventually(lambda: page_at(server.url)["results"] == 50, "all results are shown")
        page = page_at(server.url)
        assert [machine["machine"] for machine in page["machines"]] == list(NAMES)
        assert all(machine["answers"] and machine["memory_total_bytes"] > 0 for machine in page["machines"])
        assert [machine["stages"][0][1][0] for machine in page["machines"]] == ["0", "2"]
        assert {(link["source"], link["destination"]) for link in page["links"]} >= {NAMES}
        os.kill(describe(cluster.endpoints()[NAMES[1]]).process_id, signal.SIGKILL)
        eventually(lambda: page_at(server.url)["state"] == "failed", "the failure is shown")
        page = page_at(server.url)
        assert "machine-b" in page["reason"]
        assert any("failed" in text for _, text in page["events"])
        eventually(lambda: not page_at(server.url)["machines"][1]["answers"], "the machine is marked")
        assert page_at(server.url)["machines"][0]["answers"]
    with pytest.raises(OSError, match="refused"):
        page_at(server.url)


def test_in_one_process(bundle):
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2)) as deployment, deployment.dashboard() as server:
        for _ in range(3):
            deployment.run(X)
        eventually(lambda: page_at(server.url)["results"] == 3, "all results are shown")
