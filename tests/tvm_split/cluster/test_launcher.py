"""Locations of clusters, and a deployment with every launcher that can run here."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import InputError
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.worker.config import config_from_arguments
from tests.helpers.toy import toy_plugin_installed
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import launcher_at
from tvm_split.cluster.machine import Link, Machine
from tvm_split.errors import ClusterError


@pytest.mark.parametrize("location", ["in-process:2", "toy:xy", "at:ADDRESSES"])
def test_every_launcher_deploys(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this host and machines of a file: `test_readme_table`."""
    network, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval(),
        torch.ones(1, 4),
    )
    with toy_plugin_installed(), LocalWorkers(["x", "y"], token="open-sesame") as workers:
        addresses = ",".join(endpoint.address for endpoint in workers.endpoints.values())
        monkeypatch.setenv("TVM_SPLIT_TOKEN", "open-sesame")
        with Cluster.at(location.replace("ADDRESSES", addresses)) as cluster:
            first, second = cluster.machine_names
            split = {first: ["0", "1"], second: ["2"]}
            with tvm_split.compile_and_deploy(network, (x,), cluster, split=split) as deployment:
                assert [stage.machine for stage in deployment.stages] == [first, second]
                np.testing.assert_allclose(deployment.run(x)[0], network(x).detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("location", ["local:2", "toy:xy"])
def test_workers_that_a_launcher_started_end_with_the_cluster(location: str) -> None:
    with toy_plugin_installed():
        with Cluster.at(location) as cluster:
            endpoint = next(iter(cluster.endpoints().values()))
            assert describe(endpoint, PATIENCE_SECONDS).machine == cluster.machine_names[0]
        with pytest.raises(tvm_split.TvmSplitError):
            describe(endpoint, 1.0)


@pytest.mark.parametrize(
    ("location", "fields"),
    [
        ("local", {"workers": 2, "threads": 1}),
        ("local:3?threads=2", {"workers": 3, "threads": 2}),
        ("in-process?threads=4", {"machines": 1, "threads": 4}),
        ("tracker:[::1]:9190?key=box", {"address": "[::1]:9190", "key": "box", "tls": None}),
        ("kubernetes:app=worker?namespace=lab", {"selector": "app=worker", "namespace": "lab"}),
        ("ray:head:6379?workers=3&strategy=PACK", {"address": "head:6379", "workers": 3, "strategy": "PACK"}),
        ("lab.yaml", {"path": Path("lab.yaml")}),
        ("file:lab", {"path": Path("lab")}),
    ],
)
def test_locations(location: str, fields: dict[str, object]) -> None:
    launcher = launcher_at(location)
    assert {name: getattr(launcher, name) for name in fields} == fields


def test_a_launcher_is_meant_before_a_path_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    (tmp_path / "lab").write_text("machines: {}")
    assert launcher_at("local").name == "local"
    assert launcher_at("lab").path == Path("lab")  # type: ignore[attr-defined]


def test_credentials_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret\n")
    launcher = launcher_at(f"tracker:lab:9190?token_file={tmp_path}/token&tls_ca=ca.pem")
    assert (launcher.token, launcher.tls.authority) == ("secret", Path("ca.pem"))  # type: ignore[attr-defined]
    assert "secret" not in repr(launcher)
    monkeypatch.setenv("TVM_SPLIT_TOKEN", "other")
    assert launcher_at("at:lab:7001").token == "other"  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="cannot read the token file"):
        launcher_at("at:lab:7001?token_file=/nowhere")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("cluster", "no launcher 'cluster'.*local, in-process, file, at, tracker"),
        ("local:many", "workers.*its parameters are workers, threads"),
        ("local?theads=2", "theads: unknown; its parameters are workers, threads"),
        ("local:0", "workers: must be greater than or equal to 1"),
        ("local:703", "workers: must be less than or equal to 702"),
        ("local:2?workers=3", "workers has two values"),
        ("local?threads=2&threads=3", "threads has two values"),
        ("at:lab:7001?timeout_seconds=inf", "timeout_seconds: must be"),
        ("at", "at least one HOST:PORT"),
        ("at:lab:7001?token=secret", "no token; give token_file"),
    ],
)
def test_wrong_locations(location: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.at(location)


@pytest.mark.parametrize(("text", "right"), [("::1:7312", "[::1]:7312"), ("http://desk:7001", "desk:7001")])
@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda text: Cluster.at(f"at:{text}"), id="at"),
        pytest.param(lambda text: Cluster.at(f"tracker:{text}"), id="tracker"),
        pytest.param(lambda text: Machine("a", endpoint=WorkerEndpoint("a", text)), id="endpoint"),
        pytest.param(lambda text: Link("a", "b", address=text), id="link"),
        pytest.param(lambda text: config_from_arguments(["--listen", text]), id="--listen"),
        pytest.param(lambda text: config_from_arguments(["--health-listen", text]), id="--health-listen"),
        pytest.param(lambda text: config_from_arguments(["--tracker", text, "--key", "k"]), id="--tracker"),
    ],
)
def test_every_place_reads_addresses_alike(read: Callable[[str], object], text: str, right: str) -> None:
    with pytest.raises(ValueError, match=re.escape(right)):
        read(text)
