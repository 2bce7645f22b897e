"""Nobody who calls a worker takes so much of it that others get nothing."""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from rpc_runtime.client.client import describe
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import WorkerError
from rpc_runtime.program.program import BlobSpec
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import IDLE_MILLISECONDS, WorkerEndpoint
from rpc_runtime.wire.control_methods import METHODS
from rpc_runtime.wire.messages import message_of
from rpc_runtime.worker import call_limits, control_service
from rpc_runtime.worker.program_blobs import MAXIMUM_UPLOADS
from tests.helpers.rpc_runtime.pipelines import send_blobs, watched
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A
from tests.helpers.rpc_runtime.raw_calls import RawCaller, begin_upload, silence
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


@pytest.mark.slow
@pytest.mark.parametrize("path", [METHODS["PutBlob"].path, METHODS["Describe"].path], ids=["PutBlob", "Describe"])
def test_calls_that_say_nothing(workers: LocalWorkers, honest: None, path: str) -> None:
    """They hold the places of their kind and caller, and end by themselves."""
    with RawCaller(workers.endpoints[A]) as caller:
        calls = [caller.begin(path, silence()) for _ in range(300)]
        if path != METHODS["Describe"].path:
            describe(workers.endpoints[A], PATIENCE_SECONDS)
        code, words = caller.answer(path, silence())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "at a time" in words
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        assert {call.code().name for call in calls} == {"CANCELLED", "FAILED_PRECONDITION"}  # not by their own end
        describe(workers.endpoints[A], PATIENCE_SECONDS)


def test_many_deployments_of_one_caller(workers: LocalWorkers, honest: None) -> None:
    share = control_service.MAXIMUM_DEPLOYMENTS // 2
    with RawCaller(workers.endpoints[A]) as caller:
        calls = []
        for _ in range(share - 1):  # the honest one counts as well
            request = pb.WatchRequest(deployment=secrets.token_hex(16)).SerializeToString()
            calls.append(caller.begin(METHODS["Watch"].path, [request]))
            next(calls[-1])
        code, words = caller.answer(METHODS["Watch"].path, [pb.WatchRequest(deployment="0" * 32).SerializeToString()])
        assert (code, f"{share} deployments of one host" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        describe(workers.endpoints[A], PATIENCE_SECONDS)
        for call in calls:
            call.cancel()


def test_long_requests_are_not_parsed_for_anybody(own_worker: WorkerEndpoint) -> None:
    """Two bytes a stage: parsed, and looked at, that is gigabytes, and seconds in which nobody else computes."""
    path, stages = METHODS["LoadStages"].path, b"\x1a\0" * 4_000_000
    with RawCaller(own_worker) as caller, watched(own_worker) as (_, deployment):
        named = pb.LoadStagesRequest(deployment=deployment).SerializeToString()
        code, words = caller.answer(path, [named + stages])
        assert (code, "more than 262144 fields" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        nested = b"\x1a\xfc\xff\x7f" + b"\x3a\0" * ((1 << 20) - 2)  # as weights of one stage
        assert "more than 262144 fields" in caller.answer(path, [named + nested])[1]
        for nobody in (b"", pb.LoadStagesRequest(deployment="0" * 32).SerializeToString()):
            assert "watch it first" in caller.answer(path, [nobody + b"\xff" * (1 << 20)])[1]


@pytest.mark.parametrize("end", [b"\x1a", b"\x1a\xff", b"\x1b\x1c", b"\x1a\xff\xff\x7f"])
def test_long_requests_without_an_end(own_worker: WorkerEndpoint, end: bytes) -> None:
    blobs = [pb.Blob(sha256="a" * 64)] * 1000
    with RawCaller(own_worker) as caller, watched(own_worker) as (_, deployment):
        request = pb.MissingBlobsRequest(deployment=deployment, blobs=blobs).SerializeToString()
        path = METHODS["MissingBlobs"].path
        assert caller.code(path, [request]) is grpc.StatusCode.OK
        assert caller.code(path, [request + end]) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
def test_connections_without_calls_are_closed(own_worker: WorkerEndpoint) -> None:
    host, _, port = own_worker.address.rpartition(":")
    with socket.create_connection((host, int(port)), IDLE_MILLISECONDS / 1000 + 5) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0")
        while stranger.recv(4096):  # settings, pings and words of farewell, and then the end, or TimeoutError
            pass
    with RawCaller(own_worker) as caller:  # a client that comes again after a while does not notice
        for _ in range(2):
            assert caller.code(METHODS["Describe"].path, [b""]) is grpc.StatusCode.OK
            time.sleep(IDLE_MILLISECONDS / 1000 + 1)


def test_all_of_loopback_is_one_host() -> None:
    class Call:
        def __init__(self, peer: str) -> None:
            self.peer = lambda: peer

    places = call_limits.Places("calls", 4)
    with contextlib.ExitStack() as held:
        for peer in ("ipv4:127.0.0.2:1", "ipv6:%5B::1%5D:2"):
            held.enter_context(places.held(Call(peer)))
        for peer in ("ipv4:127.0.0.3:3", "ipv6:%5B::ffff:127.0.0.1%5D:4"):
            with (
                pytest.raises(WorkerError, match="2 calls of one host at a time, and this host has"),
                places.held(Call(peer)),
            ):
                pass
        held.enter_context(places.held(Call("ipv6:%5B2001:db8::1%5D:5")))


@pytest.mark.slow
def test_uploads_that_never_come_to_their_end(own_worker: WorkerEndpoint, maker: ProgramMaker) -> None:
    blob = maker.blob(b"much")

    def drops(deployment: str) -> Iterator[bytes]:
        yield begin_upload(deployment, replace(blob, size_bytes=1 << 20))
        while True:
            time.sleep(2)
            yield pb.PutBlobRequest(chunk=b"x").SerializeToString()

    with RawCaller(own_worker) as caller, watched(own_worker) as (connection, deployment):
        named = [message_of(pb.Blob, blob)]
        connection._call(pb.MissingBlobsRequest(deployment=deployment, blobs=named), PATIENCE_SECONDS)
        assert caller.code(METHODS["PutBlob"].path, drops(deployment)) is grpc.StatusCode.CANCELLED


@pytest.mark.slow
def test_uploads_that_stop_in_the_middle(own_worker: WorkerEndpoint, maker: ProgramMaker) -> None:
    blobs = [maker.blob(bytes([number])) for number in range(MAXIMUM_UPLOADS + 1)]

    def stops(deployment: str, blob: BlobSpec) -> Iterator[bytes]:
        yield begin_upload(deployment, blob)
        yield from silence()

    with RawCaller(own_worker) as caller, watched(own_worker) as (connection, deployment):
        named = [message_of(pb.Blob, blob) for blob in blobs]
        connection._call(pb.MissingBlobsRequest(deployment=deployment, blobs=named), PATIENCE_SECONDS)
        calls = [caller.begin(METHODS["PutBlob"].path, stops(deployment, blob)) for blob in blobs]
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        codes = Counter(call.code().name for call in calls)
        assert codes == {"FAILED_PRECONDITION": 1, "CANCELLED": MAXIMUM_UPLOADS}
        send_blobs(connection, deployment, blobs, maker)


@pytest.mark.parametrize("files", [pytest.param(1024, marks=pytest.mark.slow), 4096])
def test_connections_that_say_nothing(tmp_path: Path, files: int) -> None:
    """With too few files for all of them, the others wait until they are closed."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "rpc_runtime.worker", "--cache", str(tmp_path), "--ready-json"],
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
    for each in silent:
        each.close()
    worker.kill()
    worker.wait()


def test_calls_without_a_token_take_no_threads(own_workers: LocalWorkers) -> None:
    """Each would take its turn with those that compute and send; the thread that takes calls in refuses them."""
    worker = own_workers.endpoints[A]
    describe(worker, PATIENCE_SECONDS)
    process = psutil.Process(own_workers.process_ids[A])
    before = process.num_threads()
    with RawCaller(replace(worker, token="wrong")) as caller:
        assert caller.codes(METHODS["Describe"].path, [b""] * 2000) == {"UNAUTHENTICATED": 2000}
        assert "token is wrong or missing" in caller.answer(METHODS["Describe"].path, [b""])[1]
    assert process.num_threads() <= before + 3  # gRPC's own come and go
