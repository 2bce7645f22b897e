"""Each line of README's table does what it says; here those that need no framework but torch and ONNX."""

import os
import re
import shutil
import sys
from pathlib import Path

import onnx
import pytest
import torch
import yaml

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers import readme_table
from tests.helpers.kubernetes_api import KubernetesApi, pod
from tests.helpers.labs import write_lab
from tests.helpers.readme_table import lines, run
from tests.helpers.rpc_lab import RpcLab, free_port
from tests.helpers.ssh_server import SshServer
from tests.models.small_onnx_model import small_model
from tvm_split.cli.application import app
from tvm_split.ssh.ssh_worker import SSH_VARIABLE

ROOT = Path(__file__).parent
RUN_IN = (
    "test_readme_table.py",
    "frameworks/test_readme_table.py",
    "frameworks/tensorflow/test_readme_table.py",
    "aarch64/test_raspberry.py",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a network for two machines into ``bundle/`` in the folder of the test."""
    model = tvm_split.load_model(small_model())
    planned = tvm_split.plan(
        model, tvm_split.Cluster.local(2), split={"machine-a": ["conv_1"], "machine-b": ["conv_2"]}
    )
    path = tmp_path_factory.mktemp("compiled") / "bundle"
    tvm_split.compile(model, planned).save(path)
    return path


def test_every_line_is_run_once() -> None:
    """Each line runs in one of these files, in the environment that it needs: `make test`, `make test-extra`."""
    run_lines = [what for name in RUN_IN for what in re.findall(r'\brun\("(.+?)"', (ROOT / name).read_text())]
    assert sorted(run_lines) == sorted(lines())


def test_from_torch(folder: Path) -> None:
    network, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).eval(), torch.ones(2, 3)
    assert run("a module of torch", network=network, x=x).layer_names == ("0", "1")
    torch.export.save(torch.export.export(network, (x,)), folder / "model.pt2")
    assert "machine-a" in run("a file of `torch.export`")


def test_from_onnx(folder: Path) -> None:
    onnx.save(small_model(), folder / "model.onnx")
    assert "conv_1" in run("ONNX")


def test_to_workers_of_this_host(bundle: Path, folder: Path) -> None:
    (folder / "bundle").symlink_to(bundle)
    assert "machine-b" in run("workers of this host")


def test_to_machines_of_a_file(bundle: Path, folder: Path, three_workers: tvm_split.Workers) -> None:
    (folder / "bundle").symlink_to(bundle)
    write_lab(folder, three_workers.endpoints()).rename("cluster.yaml")
    assert "machine-b" in run("machines of a file")


def test_to_containers_of_compose(folder: Path) -> None:
    """Use compose's cluster file with its published addresses; `make test-extra NAME=container` starts containers."""
    model = tvm_split.load_model(small_model())
    split = {"worker-a": ["conv_1"], "worker-b": ["conv_2"]}
    text = (ROOT.parent / "deploy/compose/cluster.yaml").read_text()
    with LocalWorkers(["worker-a", "worker-b"], token="open-sesame") as workers:
        (folder / "secrets").mkdir()
        (folder / "secrets/token").write_text("open-sesame")
        ends = {name: end.address for name, end in workers.endpoints.items()}
        for published, name in (("127.0.0.1:7001", "worker-a"), ("127.0.0.1:7011", "worker-b")):
            text = text.replace(published, ends[name]).replace(f"{name}:7001", ends[name])
        (folder / "cluster.yaml").write_text(text)
        planned = tvm_split.plan(model, tvm_split.Cluster.from_yaml(folder / "cluster.yaml"), split=split)
        tvm_split.compile(model, planned).save(folder / "bundle")
        assert "worker-b" in run("containers of compose", **{"deploy/compose/cluster.yaml": "cluster.yaml"})


def test_to_machines_that_ssh_reaches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sshd").mkdir()
    access = {"to": "box", "python": sys.executable, "folder": str(folder / "remote")}
    (folder / "token").write_text("open-sesame")
    listed = {"name": "box", "address": f"127.0.0.1:{free_port()}", "token_file": "token", "ssh": access}
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"machines": [listed]}))
    with SshServer(folder / "sshd") as server:
        monkeypatch.setenv(SSH_VARIABLE, server.command)
        try:
            run("machines that ssh reaches")
        finally:
            ended = readme_table.CliRunner().invoke(app, ["down", "cluster.yaml", "--remove"])
        assert ended.exit_code == 0, ended.output


def test_to_what_the_tracker_lists(bundle: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bundle").symlink_to(bundle)
    with RpcLab(folder, servers=0) as lab:
        for name in ("machine-a", "machine-b"):
            lab.start_worker(name)
        lab.wait_listed(lambda servers: {"machine-a", "machine-b"} <= set(servers))
        assert "machine-b" in run("what TVM's RPC tracker lists", **{"tracker.lab.example:9190": lab.address})


def test_to_ray(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import ray

    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # Sockets are below this folder, and the length of their paths is limited.
    ray_folder = Path("/tmp") / f"ray-{os.getpid()}-table"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(ray_folder),
        _node_ip_address="127.0.0.1",
    )
    try:
        with run("Ray") as cluster:
            assert len(cluster.endpoints()) == 2
    finally:
        ray.shutdown()
        shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="asks kubectl")
def test_to_pods_of_kubernetes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalWorkers(["tvm-split-0"]) as workers, KubernetesApi(folder) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.config))
        monkeypatch.setenv("HOME", str(folder))
        end = workers.endpoints["tvm-split-0"]
        monkeypatch.setenv("TVM_SPLIT_TOKEN", str(end.token))
        api.pods = [pod("tvm-split-0", end.address)]
        assert "tvm-split-0" in run("pods of Kubernetes")
