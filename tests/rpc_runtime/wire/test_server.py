"""Access control before a worker's methods: callers, quotas, malformed requests, silent connections."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import WorkerError
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.programs import A
from tests.helpers.rpc_runtime.raw_calls import METHODS, Method, RawCaller, silence
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

FORGED = b"\x0a\xff\xff\xff\xff\x0f"
"""A field that announces more bytes than follow."""


@pytest.fixture(scope="module")
def own_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A]) as started:
        yield started


@pytest.fixture
def worker(own_workers: LocalWorkers) -> WorkerEndpoint:
    return own_workers.endpoints[A]


@pytest.mark.parametrize("method", [METHODS["Describe"], METHODS["LoadStages"]], ids=lambda method: method.name)
def test_malformed_requests_are_refused_and_leave_nothing_behind(own_workers: LocalWorkers, method: Method) -> None:
    process = psutil.Process(own_workers.process_ids[A])
    with RawCaller(own_workers.endpoints[A]) as caller:
        assert caller.codes(method.path, [FORGED] * 500) == {"INVALID_ARGUMENT": 500}
        before = process.memory_info().rss
        assert caller.codes(method.path, [FORGED] * 2000) == {"INVALID_ARGUMENT": 2000}
        code, words = caller.answer(method.path, [])
    assert (code, "the caller sent none" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert process.memory_info().rss - before < 16 << 20  # 2000 times 16 KiB would be 32 MiB


def test_calls_that_say_nothing_hold_the_quota_of_their_kind_only(worker: WorkerEndpoint) -> None:
    """This holds also with more calls than threads; a caller that disconnects frees its part of the quota."""
    path = METHODS["PutBlob"].path
    with RawCaller(worker) as caller:
        calls = [caller.begin(path, silence()) for _ in range(600)]

        def is_refused() -> bool:
            code, words = caller.answer(path, silence())
            return code is grpc.StatusCode.FAILED_PRECONDITION and "its limit; try again later" in words

        eventually(is_refused, "all uploads of the quota are taken")
        describe(worker, PATIENCE_SECONDS)
        for call in calls:
            call.cancel()
    with RawCaller(worker) as caller:
        eventually(lambda: caller.code(path, []) is grpc.StatusCode.OK, "the quota is free again")


def test_strangers_are_refused_whatever_they_say(worker: WorkerEndpoint) -> None:
    """A call without the token is not read, so neither silence nor length costs anything."""
    with RawCaller(replace(worker, token="wrong")) as caller:
        path = METHODS["Describe"].path
        calls = [caller.begin(path, silence()) for _ in range(300)]
        assert {call.code().name for call in calls} == {"UNAUTHENTICATED"}
        assert caller.codes(path, [b""] * 2000) == {"UNAUTHENTICATED": 2000}
        assert "token is wrong or missing" in caller.answer(path, [b""])[1]
    describe(worker, PATIENCE_SECONDS)


@pytest.mark.slow
def test_connections_without_calls_are_closed(worker: WorkerEndpoint) -> None:
    host, _, port = worker.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0")
        while stranger.recv(4096):  # settings, pings and GOAWAY, and then the end, or TimeoutError
            pass


@pytest.mark.parametrize("files", [pytest.param(1024, marks=pytest.mark.slow), 4096])
def test_connections_that_say_nothing(tmp_path: Path, files: int) -> None:
    """With too few file descriptors for all connections, the others wait until some are closed."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "rpc_runtime.worker", "--cache", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, files)),
    )
    assert worker.stdout is not None
    address = json.loads(worker.stdout.readline())["address"]
    host, _, port = address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), PATIENCE_SECONDS) for _ in range(1500)]

    def answered() -> bool:
        with contextlib.suppress(WorkerError):
            describe(WorkerEndpoint("x", address), 5)
            return True
        return False

    eventually(answered, "the worker answers")
    for connection in silent:
        connection.close()
    worker.kill()
    worker.wait()
