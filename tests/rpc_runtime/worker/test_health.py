"""Health checks as orchestrators make them, with the stub of gRPC's own package."""

import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb, health_pb2_grpc

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import WorkerError
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.wire.server import CONTROL_SERVICE, HEALTH_PATHS
from tests.helpers.rpc_lab import free_port
from tests.helpers.rpc_runtime.certificates import make_authority, worker_arguments
from tests.helpers.rpc_runtime.programs import A
from tests.helpers.rpc_runtime.raw_calls import METHODS, RawCaller, silence
from tests.helpers.rpc_runtime.worker_process import Start, ready
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


def check(channel: Any, service: str = "") -> int:
    request = pb.HealthCheckRequest(service=service)
    with channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS).status)


def test_health_is_for_all_and_nothing_else_is(start: Start) -> None:
    address = ready(start("--json", TVM_SPLIT_TOKEN="abc"))
    for service in ("", CONTROL_SERVICE):
        assert check(grpc.insecure_channel(address), service) == SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        check(grpc.insecure_channel(address), "other")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(WorkerError, match="the token is wrong or missing"):
        describe(WorkerEndpoint(A, address, "wrong"), PATIENCE_SECONDS)


def test_who_watches_is_told_of_the_end(start: Start) -> None:
    process = start("--json", TVM_SPLIT_TOKEN="abc")
    with grpc.insecure_channel(ready(process)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watched = stub.Watch(pb.HealthCheckRequest(), timeout=60)
        unknown = stub.Watch(pb.HealthCheckRequest(service="other"), timeout=60)
        assert next(watched).status == SERVING
        assert next(unknown).status == pb.HealthCheckResponse.SERVICE_UNKNOWN
        process.send_signal(signal.SIGTERM)
        assert next(watched).status == NOT_SERVING
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_probe_without_tls(start: Start, tmp_path: Path) -> None:
    """The worker's own port keeps TLS; the other port answers only health checks."""
    lab = make_authority(tmp_path)
    port = free_port()
    probed = f"127.0.0.1:{port}"
    arguments = worker_arguments(lab.files("box"), mutual=True)
    process = start(*arguments, "--health-listen", probed)
    address = ready(process)
    assert check(grpc.insecure_channel(probed), CONTROL_SERVICE) == SERVING
    assert check(grpc.secure_channel(address, lab.files("me").channel_credentials())) == SERVING
    with pytest.raises(grpc.RpcError):  # no certificate of the caller
        check(grpc.secure_channel(address, TlsFiles(lab.certificate).channel_credentials()))
    with RawCaller(WorkerEndpoint(A, probed)) as caller:
        assert caller.code(METHODS["Describe"].path, [b""]) is grpc.StatusCode.UNIMPLEMENTED
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
    eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) != 0, "the port for health is closed")


def test_nonsense_is_refused(workers: LocalWorkers) -> None:
    with RawCaller(workers.endpoints[A]) as caller:
        for path in HEALTH_PATHS:
            for requests in ([b"\xff"], []):
                assert caller.code(path, requests) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
def test_silent_strangers_take_the_quota_of_health_checks_alone_and_not_for_long(workers: LocalWorkers) -> None:
    with RawCaller(replace(workers.endpoints[A], token=None)) as caller:
        calls = [caller.begin(HEALTH_PATHS[0], silence()) for _ in range(40)]
        assert describe(workers.endpoints[A], PATIENCE_SECONDS).machine == A
        assert all(call.code() is not grpc.StatusCode.OK for call in calls)
    assert check(grpc.insecure_channel(workers.endpoints[A].address)) == SERVING
