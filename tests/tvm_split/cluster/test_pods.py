"""Pods as machines: the real kubectl and real workers, but of the cluster only the API that kubectl calls."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from tests.helpers.kubernetes_api import KubernetesApi, pod
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cli.application import app
from tvm_split.cluster.cluster import Cluster
from tvm_split.errors import ClusterError

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="asks kubectl")
SELECTOR = "app.kubernetes.io/name=tvm-split"


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers(["tvm-split-0", "tvm-split-1"]) as started:
        yield started


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    with KubernetesApi(tmp_path) as served:
        monkeypatch.setenv("KUBECONFIG", str(served.config))
        monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl caches facts about a cluster
        yield served


def test_ready_pods_are_the_cluster(api: KubernetesApi, workers: LocalWorkers) -> None:
    ends = workers.endpoints
    token = ends["tvm-split-0"].token
    api.pods = [pod(name, end.address) for name, end in ends.items()]
    api.pods += [
        pod("tvm-split-2", "127.0.0.1:9", ready=False),
        pod("tvm-split-3", "127.0.0.1:9", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("tvm-split-4", "127.0.0.1:9"),
        pod("tvm-split-5", ends["tvm-split-0"].address),
    ]
    cluster = Cluster.at(f"kubernetes:{SELECTOR}", token=token, timeout_seconds=PATIENCE_SECONDS)
    assert api.selectors == [SELECTOR]
    assert {machine.name: machine.address for machine in cluster.machines} == {
        name: e.address for name, e in ends.items()
    }
    reasons = {name.split(" ")[0]: reason for name, reason in cluster.left_out.items()}
    assert "its pod is not ready (phase Running)" in reasons["tvm-split-2"]
    assert "its pod is ending" in reasons["tvm-split-3"]
    assert "it cannot be reached" in reasons["tvm-split-4"]
    assert "the worker that answers is 'tvm-split-0'" in reasons["tvm-split-5"]


def test_status_and_what_is_wrong(api: KubernetesApi, workers: LocalWorkers, tmp_path: Path) -> None:
    end = workers.endpoints["tvm-split-0"]
    (tmp_path / "token").write_text(str(end.token))
    api.pods = [pod("tvm-split-0", end.address), pod("tvm-split-1", "127.0.0.1:9", ready=False)]
    options = ["status", "--json", "--kubernetes"]
    location = f"{SELECTOR}?token_file={tmp_path}/token"
    result = CliRunner().invoke(app, [*options, location])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["workers"]
    assert (first["machine"], first["reachable"], first["reason"]) == ("tvm-split-0", True, "")
    assert (second["reachable"], "error" in second) == (False, False)
    result = CliRunner().invoke(app, [*options, f"{location}&namespace=other"])
    assert result.exit_code == 1, result.output
    assert "you may not list these\\x1b[2J" in result.stderr
    api.pods = []
    with pytest.raises(ClusterError, match="has no machine that can be deployed to"):
        Cluster.at(f"kubernetes:{SELECTOR}")
    api.pods = [{"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "x"}}]
    with pytest.raises(ProtocolError, match="invalid pod"):
        Cluster.at(f"kubernetes:{SELECTOR}")


def test_a_stateful_pod_is_called_by_its_own_name(api: KubernetesApi) -> None:
    stateful = pod("tvm-split-0", "192.0.2.1:7001", ready=False)
    stateful["spec"] |= {"hostname": "tvm-split-0", "subdomain": "tvm-split"}
    api.pods = [stateful]
    with pytest.raises(ClusterError, match=r"tvm-split-0 at tvm-split-0\.tvm-split\.lab\.svc:7001: its pod is not"):
        Cluster.at(f"kubernetes:{SELECTOR}")


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerUnavailableError, match="not installed here"):
        Cluster.at(f"kubernetes:{SELECTOR}")
