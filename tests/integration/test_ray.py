"""Ray on loopback: it places, loses and restarts workers."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import tvm_split
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import DeadlineError, WorkerUnavailableError
from tests.helpers.waiting import eventually
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError
from tvm_split.launchers.ray import Ray

MODULE = "rpc_runtime.worker"


def workers_running(home: Path, machine: str = "machine-a") -> set[int]:
    """Return the worker processes of a machine that Ray started, recognised by ``HOME``; they are not our children."""
    process_ids = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            is_one = f"--name={machine}" in words and any(word.endswith(MODULE) for word in words)
            if is_one and process.environ().get("HOME") == str(home):
                process_ids.add(process.pid)
    return process_ids


def installed_ray(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Ray's package, with its environment set for this test alone."""
    for name, value in {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}.items():
        monkeypatch.setenv(name, value)
    import ray

    return ray


@pytest.fixture
def own_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start Ray with two CPUs on loopback; remove its files at the end."""
    ray = installed_ray(tmp_path, monkeypatch)
    # Its sockets are in this folder, and their paths must be short.
    folder = Path("/tmp") / f"ray-{tmp_path.name[-20:]}"
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=str(folder), _node_ip_address="127.0.0.1"
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def three_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Nodes of one CPU each in Ray, which this process has joined.

    Each has its own loopback address, because Ray replaces 127.0.0.1 by the host's first address.
    """
    ray = installed_ray(tmp_path, monkeypatch)
    from ray.cluster_utils import Cluster

    folder = Path("/tmp") / f"nodes-{tmp_path.name[-20:]}"
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    nodes = Cluster(shutdown_at_exit=False)
    try:
        for number in (2, 3, 4):
            nodes.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number}", include_dashboard=False)
        ray.init(nodes.address, log_to_driver=False, _node_ip_address="127.0.0.2")
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def actor_of(machine: str) -> Any:
    import ray

    (name,) = [name for name in ray.util.list_named_actors() if name.endswith(f"-{machine}")]
    return ray.get_actor(name)


def hosts(cluster: tvm_split.Workers) -> list[str]:
    return sorted(endpoint.address.rpartition(":")[0] for endpoint in cluster.endpoints().values())


@pytest.mark.slow
def test_another_process_joins_and_leaves(own_ray: Any, tmp_path: Path) -> None:
    address = own_ray.get_runtime_context().gcs_address
    code = (
        "import tvm_split, sys\n"
        "from rpc_runtime.client.worker_client import describe\n"
        "cluster = tvm_split.Cluster.at('ray', address=sys.argv[1], workers=2, strategy='PACK').start()\n"
        "print(*(describe(each, 30).machine for each in cluster.endpoints().values()))\n"
    )  # it closes nothing, and ends
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=120)
    assert done.stdout == "machine-a machine-b\n", done.stderr
    with pytest.raises(DeadlineError, match=r"no room within 2 s for 2 workers with \{'CPU': 64\.0\} each"):
        tvm_split.Cluster.at("ray", workers=2, threads=64, timeout_seconds=2.0).start().endpoints()
    machines, launcher = (Machine("machine-a"), Machine("machine-b", threads=2)), Ray(resources={"CPU": 1})
    with tvm_split.Cluster(machines, launcher=launcher) as workers:
        threads = [describe(endpoint, 30).threads for endpoint in workers.endpoints().values()]
        assert threads == [1, 2]
    eventually(lambda: not workers_running(tmp_path), "no worker is left")
    eventually(lambda: own_ray.available_resources().get("CPU") == 2.0, "Ray has both CPUs back")


@pytest.mark.slow
def test_three_nodes_one_of_which_dies(three_nodes: Any, tmp_path: Path) -> None:
    import ray

    network, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).eval(), torch.randn(1, 8)
    split = {name: [str(number)] for number, name in enumerate(("machine-a", "machine-b", "machine-c"))}
    with tvm_split.Cluster.at("ray", workers=3, strategy="STRICT_SPREAD") as cluster:
        assert hosts(cluster) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        with tvm_split.compile_and_deploy(network, (x,), cluster, split=split) as deployment:
            assert {stage.machine for stage in deployment.stages} == set(split)
            np.testing.assert_allclose(deployment.run(x)[0], network(x).detach().numpy(), rtol=1e-4, atol=1e-5)
            ray.kill(actor_of("machine-b"), no_restart=False)
            eventually(lambda: "machine-b" not in deployment.placement["stage_1"], "its stage is elsewhere")
            with pytest.warns(tvm_split.RecoveryWarning, match="machine-b"):
                y = deployment.run(x)[0]
            np.testing.assert_allclose(y, network(x).detach().numpy(), rtol=1e-4, atol=1e-5)
        with tvm_split.compile_and_deploy(network, (x,), cluster, split=split) as deployment:
            np.testing.assert_allclose(deployment.run(x)[0], network(x).detach().numpy(), rtol=1e-4, atol=1e-5)
        assert hosts(cluster) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    eventually(lambda: not any(workers_running(tmp_path, name) for name in split), "no worker is left")


@pytest.mark.parametrize(
    "resources", [{"memory": -1}, {"fpga": float("inf")}, {"GPU": float("nan")}, {"memory": "1 GB"}, [("GPU", 1)]]
)
def test_amounts_that_nobody_has(resources: Any) -> None:
    with pytest.raises(ClusterError, match=r"'ray:.*': resources.*its parameters are address, workers, threads"):
        tvm_split.Cluster.at("ray:127.0.0.1:9", resources=resources)


def test_without_a_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="strategy: must be 'SPREAD'"):
        tvm_split.Cluster.at("ray?strategy=ANYWHERE")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'tvm-split\[ray\]'"):
        tvm_split.Cluster.at("ray:127.0.0.1:9").start().endpoints()


@pytest.mark.slow
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(WorkerUnavailableError, match=r"no Ray can be joined at 127\.0\.0\.1:9"):
        tvm_split.Cluster.at("ray:127.0.0.1:9").start().endpoints()
