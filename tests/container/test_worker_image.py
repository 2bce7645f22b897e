"""The image of ``deploy/Containerfile``, and the workers that compose starts of it, in real containers.

``make test-extra NAME=container`` builds it. Their own networks are compose's part: here containers share the host's.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tvm_split
from rpc_runtime.client.worker_client import describe
from tests.container.image import IMAGE, LIMITS, podman
from tests.helpers.rpc_lab import free_port
from tests.helpers.waiting import wait_while_running

FOLDER = Path(os.environ["CONTAINER_FOLDER"])
COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "deploy/compose/compose.yaml").read_text())
TOKEN = "open-sesame"
RUN = [*podman(FOLDER), "run", "--rm", "--network=host", "--cgroups=disabled", "--no-hosts", *LIMITS]


def is_serving(port: int) -> bool:
    """Whether the worker is healthy, asked as grpc_health_probe asks."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def started(name: str, service: dict[str, Any], token: Path) -> Iterator[int]:
    """Run a service of compose's file, with its options, on ports of this test; yield its port. End it by TERM."""
    port, health = free_port(), free_port()
    places = {"0.0.0.0:7001": f"127.0.0.1:{port}", "127.0.0.1:7002": f"127.0.0.1:{health}"}
    arguments = [re.sub("|".join(places), lambda match: places[match[0]], word) for word in service["command"]]
    options = ["--read-only", *(f"--cap-drop={capability}" for capability in service["cap_drop"])]
    options += [f"--security-opt={rule.replace(':true', '')}" for rule in service["security_opt"]]
    options += [f"--tmpfs={folder}" for folder in service["tmpfs"]]
    options += [f"--volume={token}:/run/secrets/token:ro"]
    command = [*RUN, f"--name={name}-{os.getpid()}", *options, IMAGE, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_while_running(process, lambda: is_serving(health))
        yield port
        process.terminate()
        _, errors = process.communicate(timeout=int(re.sub(r"\D", "", service["stop_grace_period"])) + 10)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()


def test_the_image_has_no_compiler_and_no_root() -> None:
    code = (
        "import os, glob, tvm_ffi; print(os.getuid(), os.access('/worker', os.W_OK), "
        "glob.glob('/worker/lib/python3*/site-packages/tvm/lib/*compiler*'))"
    )
    command = [*RUN, "--entrypoint=python", IMAGE, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "10001 False []\n", done.stderr


def test_workers_of_compose_answer_and_compute(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)).eval()
    x = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(started(name, service, token)) for name, service in COMPOSE["services"].items()
        }
        listed = [{"name": name, "address": f"127.0.0.1:{port}", "token_file": "token"} for name, port in ports.items()]
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"machines": listed}))
        cluster = tvm_split.Cluster.from_yaml(tmp_path / "cluster.yaml")
        assert [describe(endpoint, 10).machine for endpoint in cluster.start().endpoints().values()] == [
            "worker-a",
            "worker-b",
        ]
        split = {"worker-a": ["0"], "worker-b": ["2"]}
        with tvm_split.compile_and_deploy(network, (x,), cluster, split) as deployment:
            assert {stage.machine for stage in deployment.stages} == set(split)
            (output,) = deployment.run(x)
        np.testing.assert_allclose(output, network(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_worker_without_its_token_says_so() -> None:
    arguments = ["--listen=127.0.0.1:0", "--token-file=/run/secrets/token", "--insecure"]
    done = subprocess.run([*RUN, IMAGE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "cannot read the token file /run/secrets/token" in done.stderr
