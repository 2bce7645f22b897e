"""TVM's own tracker, with machines that are deployed to, tuned on, leave and return."""

import json
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tvm_split
from rpc_runtime.errors import InputError
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.wire.tracker import RPC_MAGIC, RPC_MISMATCH
from schedules.tuning.errors import DeviceError
from schedules.tuning.measuring import Effort
from tests.helpers.rpc_lab import KEY, RpcLab, kill_group
from tests.helpers.rpc_runtime.certificates import make_authority, worker_arguments
from tests.helpers.waiting import PATIENCE_SECONDS, eventually, stopped
from tvm_split.cli.application import app

QUICK = Effort(rounds=1, runs=3, build_timeout_seconds=60.0)
A, B = "box-a", "box-b"
pytestmark = pytest.mark.usefixtures("no_process_stays")


@pytest.fixture(scope="module")
def network() -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10)
        ).eval()
        return network, torch.randn(1, 3, 6, 6)


def deploy_and_check(network: tuple[torch.nn.Module, torch.Tensor], cluster: tvm_split.Cluster) -> None:
    module, x = network
    names = cluster.machine_names
    split = {names[0]: ["0", "1"], names[-1]: ["2", "3"]} if len(names) > 1 else {names[0]: ["0", "1", "2", "3"]}
    with tvm_split.compile_and_deploy(module, (x,), cluster, split=split) as deployment:
        assert {stage.machine for stage in deployment.stages} == set(names)
        np.testing.assert_allclose(deployment.run(x)[0], module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_worker_is_listed_deployed_to_and_gone(network, tmp_path):
    with RpcLab(tmp_path, servers=0) as lab:
        process = lab.start_worker(A)
        lab.wait_listed(lambda workers: A in workers)
        command = [sys.executable, "-m", "tvm.exec.query_rpc_tracker", "--host", "127.0.0.1", "--port", str(lab.port)]
        listed = subprocess.run(command, env=lab.environment, capture_output=True, text=True, check=True, timeout=60)
        assert f"server:{KEY}" in listed.stdout
        cluster = tvm_split.Cluster.at(f"tracker:{lab.address}", key=KEY)
        assert (cluster.machine_names, cluster.left_out) == ((A,), {})
        with cluster as workers:
            deploy_and_check(network, workers)
            kill_group(process)
            eventually(lambda: not lab.listed(), "the killed worker is not listed")
            process = lab.start_worker(A)  # which listens on another port
            lab.wait_listed(lambda listed: A in listed)
            deploy_and_check(network, workers)
        status = CliRunner().invoke(app, ["status", "--tracker", f"{lab.address}?key={KEY}", "--json"])
        assert status.exit_code == 0, status.output
        (worker_row,) = json.loads(status.stdout)["workers"]
        assert (worker_row["machine"], worker_row["reason"]) == (A, "")
        with stopped(process.pid), pytest.raises(tvm_split.ClusterError, match="it did not answer in time"):
            tvm_split.Cluster.at(f"tracker:{lab.address}", timeout_seconds=1.0)
        with pytest.raises(tvm_split.ClusterError, match="under the key 'other' has no machine"):
            tvm_split.Cluster.at(f"tracker:{lab.address}?key=other")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
        eventually(lambda: not lab.listed(), "the tracker lists nothing")
        with pytest.raises(tvm_split.ClusterError, match="has no machine that can be deployed to"):
            tvm_split.Cluster.at(f"tracker:{lab.address}")


@pytest.mark.slow
def test_deploy_tune_deploy_again(network, tmp_path):
    model = tvm_split.load_model(network[0], (network[1],))
    with RpcLab(tmp_path, servers=1) as lab:
        for name in (A, B):
            lab.start_worker(name)
        lab.wait_listed(lambda workers: {A, B} <= set(workers))
        cluster = tvm_split.Cluster.at(f"tracker:{lab.address}", key=KEY)
        assert cluster.machine_names == (A, B)
        ((plain, reason),) = cluster.left_out.items()
        assert "127.0.0.1:" in plain
        assert "can be tuned on it" in reason
        status = CliRunner().invoke(app, ["status", "--tracker", lab.address])
        assert status.exit_code == 0, status.output
        assert "a server of TVM's RPC: kernels can be tuned on it" in status.stdout
        tvm_split.compile(model, tvm_split.plan(model, cluster, split={A: ["0", "1"], B: ["2", "3"]})).save(
            tmp_path / "b"
        )
        ran = CliRunner().invoke(app, ["run", str(tmp_path / "b"), "--tracker", lab.address, "--random", "2", "--json"])
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.stdout)["micro_batches"] == 2
        deploy_and_check(network, cluster)

        kill_group(lab.servers[0])  # so that all tuning happens on the workers
        lab.wait_listed(lambda workers: set(workers) == {A, B})
        seen: set[str] = set()

        def look(progress: object) -> None:
            for worker in lab.listed():
                if worker.registration is not None and worker.registration.state == "tuning":
                    seen.add(worker.registration.name)

        plan = tvm_split.plan(model, tvm_split.Cluster.in_process(machines=1, threads=1), estimate=True)
        report = tvm_split.tune(
            model, plan, database=tmp_path / "tuned", trials=8, tracker=lab.address, key=KEY, effort=QUICK,
            on_progress=look,
        )  # fmt: skip
        assert (report.devices, report.trials) == (2, 8)
        assert all(kernel.default_seconds is not None and not kernel.failures for kernel in report.kernels)
        assert seen
        tuning = [worker for worker in lab.listed() if worker.registration and worker.registration.state == "tuning"]
        assert tuning
        with pytest.raises(tvm_split.ClusterError, match="kernels are being tuned on it"):
            tvm_split.Cluster.at(f"tracker:{lab.address}", key=KEY).machine(tuning[0].registration.name)
        lab.wait_listed(lambda workers: all(worker.registration.state == "ready" for worker in workers.values()))
        deploy_and_check(network, tvm_split.Cluster.at(f"tracker:{lab.address}", key=KEY))


@pytest.mark.slow
def test_workers_outlive_their_tracker(tmp_path):
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker(A)
        lab.wait_listed(lambda workers: A in workers)
        lab.restart_tracker()
        workers = lab.wait_listed(lambda workers: A in workers)
        assert workers[A].registration.tunes
        eventually(lambda: lab.count() == 1, "the tracker counts one device")


@pytest.mark.slow
def test_a_deployment_keeps_tuners_away(network, tmp_path):
    module, x = network
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker(A)
        lab.wait_listed(lambda workers: A in workers)
        assert lab.count() == 1
        with tvm_split.compile_and_deploy(module, (x,), tvm_split.Cluster.at(f"tracker:{lab.address}")):
            lab.wait_listed(lambda workers: workers[A].registration.state == "deployed")
            with pytest.raises(DeviceError, match="1 hold a deployment"):
                lab.tracker().count_devices()
            assert tvm_split.Cluster.at(f"tracker:{lab.address}").machine_names == (A,)
        eventually(lambda: lab.count() == 1, "the tracker counts one device")


@pytest.mark.slow
def test_who_has_no_key_is_not_served(tmp_path):
    with RpcLab(tmp_path, servers=0) as lab, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.close()
        lab.start_worker(A, "--insecure", "--tuning-port", str(port))
        lab.wait_listed(lambda workers: A in workers)
        eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "the tuning port takes connections")
        for key in (b"client:lab:0.5", b"client:", b"\xff\xfe"):
            with socket.create_connection(("127.0.0.1", port), 10) as caller:
                caller.sendall(struct.pack("<ii", RPC_MAGIC, len(key)) + key)
                answer = caller.recv(4)
                assert answer in (b"", struct.pack("<i", RPC_MISMATCH))
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<ii", RPC_MAGIC, 1 << 30), b""):
            with socket.create_connection(("127.0.0.1", port), 10) as caller:
                caller.sendall(nonsense)
                with suppress(ConnectionResetError):
                    assert caller.recv(4) == b""
        assert lab.wait_listed(lambda workers: A in workers)[A].registration.state == "ready"


@pytest.mark.slow
def test_tls_and_tokens_at_a_tracker(network, tmp_path):
    authority = make_authority(tmp_path)
    arguments = worker_arguments(authority.files("box"), mutual=False)
    (tmp_path / "token").write_text("open-sesame\n")
    secret = ("--token-file", str(tmp_path / "token"))
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker(A, *arguments, *secret)
        assert not lab.wait_listed(lambda workers: A in workers)[A].registration.tunes
        with pytest.raises(tvm_split.ClusterError, match="its worker wants TLS: give tls_ca"):
            tvm_split.Cluster.at(f"tracker:{lab.address}")
        with pytest.raises(InputError, match="a token needs TLS"):
            tvm_split.Cluster.at(f"tracker:{lab.address}", token="open-sesame")
        tls = TlsFiles(authority.certificate)
        with pytest.raises(tvm_split.ClusterError, match="the token is wrong or missing"):
            tvm_split.Cluster.at(f"tracker:{lab.address}", tls=tls)
        deploy_and_check(network, tvm_split.Cluster.at(f"tracker:{lab.address}", token="open-sesame", tls=tls))
