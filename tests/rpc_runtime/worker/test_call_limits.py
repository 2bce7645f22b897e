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
from typing import Any

import grpc
import pytest

from tests.rpc_runtime.client.test_failures import deployments_left
from tests.rpc_runtime.client.test_pipeline import A, batches_for, double, open_on, same
from tests.rpc_runtime.program_maker import ProgramMaker
from tests.rpc_runtime.raw_calls import RawCaller, memory_bytes, silence, threads
from tests.waiting import wait_for
from tvm_split.rpc_runtime.client.client import WorkerConnection, describe
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.errors import DeadlineError, ProtocolError, WorkerError
from tvm_split.rpc_runtime.program.machine_plan import machine_plan
from tvm_split.rpc_runtime.program.program import BlobSpec, Program
from tvm_split.rpc_runtime.wire import worker_pb2 as pb
from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.rpc_runtime.wire.control_methods import METHODS, Method
from tvm_split.rpc_runtime.wire.messages import (
    LINK_SECRET_BYTES,
    load_request,
    message_of,
    plan_from_request,
)
from tvm_split.rpc_runtime.worker import call_limits, control_service
from tvm_split.rpc_runtime.worker.program_blobs import MAXIMUM_UPLOADS

ROOT = Path(__file__).resolve().parents[3]
FORGED = b"\x0a\xff\xff\xff\xff\x0f"
"""A field that announces more than there is."""
PROMPT_SECONDS = 8.0
"""Less than a silent call may last, and more than a busy machine takes."""
"""An answer that waited for nobody, on a machine that others use too."""


@pytest.fixture
def honest(workers: LocalWorkers, tmp_path: Path) -> Iterator[None]:
    """A deployment beside what a test does, which gives right answers before, after, and promptly."""
    maker = ProgramMaker(tmp_path / "honest")
    program = one_stage(maker)
    batch = batches_for(program, 1)[0]
    with open_on(workers, program, maker) as pipeline:
        expected = pipeline.run(batch)
        yield
        assert same(pipeline.run(batch), expected)
        prompt(workers.endpoints[A])
    assert deployments_left(workers.endpoints[A]) == ()


def one_stage(maker: ProgramMaker) -> Program:
    return maker.program([maker.stage("one", A, [maker.input("x")], double)])


@contextlib.contextmanager
def watched(endpoint: WorkerEndpoint) -> Iterator[tuple[WorkerConnection, str]]:
    """A deployment that somebody begins."""
    connection, deployment = WorkerConnection(endpoint), secrets.token_hex(16)
    watch = connection.watch(deployment)
    next(watch)
    try:
        yield connection, deployment
    finally:
        watch.cancel()
        connection.close()


def prompt(endpoint: WorkerEndpoint) -> None:
    start = time.monotonic()
    describe(endpoint, 20)
    assert time.monotonic() - start < PROMPT_SECONDS


@pytest.mark.parametrize("method", [METHODS["Describe"], METHODS["LoadStages"]], ids=lambda method: method.name)
def test_requests_that_cannot_be_parsed_leave_nothing_behind(workers: LocalWorkers, method: Method) -> None:
    with RawCaller(workers.endpoints[A]) as caller:
        caller.codes(method.path, [FORGED] * 500)
        before = memory_bytes(workers.process_ids[A])
        assert caller.codes(method.path, [FORGED] * 4000) == {"INVALID_ARGUMENT": 4000}
    assert memory_bytes(workers.process_ids[A]) - before < 16 << 20  # 4000 times 16 KiB would be 64 MiB


def test_a_request_that_is_too_long_or_missing(workers: LocalWorkers) -> None:
    with RawCaller(workers.endpoints[A]) as caller:
        assert caller.answer(METHODS["Describe"].path, [b"\x0a" * 100_000]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "a request of Describe has at most 65536 bytes, got 100000",
        )
        assert caller.answer(METHODS["Describe"].path, [])[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
@pytest.mark.parametrize("path", [METHODS["PutBlob"].path, METHODS["Describe"].path], ids=["PutBlob", "Describe"])
def test_calls_that_say_nothing(workers: LocalWorkers, honest: None, path: str) -> None:
    """They hold the places of their kind and caller, and end by themselves."""
    with RawCaller(workers.endpoints[A]) as caller:
        calls = [caller.begin(path, silence()) for _ in range(300)]
        if path != METHODS["Describe"].path:
            prompt(workers.endpoints[A])
        code, words = caller.answer(path, silence())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "at a time" in words
        start = time.monotonic()
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        assert time.monotonic() - start < call_limits.GREETING_SECONDS + 5
        prompt(workers.endpoints[A])


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
        prompt(workers.endpoints[A])
        for call in calls:
            call.cancel()


def first(deployment: str, blob: BlobSpec) -> bytes:
    return pb.PutBlobRequest(deployment=deployment, blob=message_of(pb.Blob, blob)).SerializeToString()


def test_a_blob_belongs_to_a_deployment(workers: LocalWorkers, maker: ProgramMaker, honest: None) -> None:
    blob = maker.blob(b"a blob of its own")
    chunk = pb.PutBlobRequest(chunk=b"a blob of its own").SerializeToString()
    with RawCaller(workers.endpoints[A]) as caller, watched(workers.endpoints[A]) as (connection, deployment):
        code, words = caller.answer(METHODS["PutBlob"].path, [first("0" * 32, blob), chunk])
        assert (code, "watch it first" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, words = caller.answer(METHODS["PutBlob"].path, [first(deployment, blob), chunk])
        assert (code, "none that deployment" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert connection.send_blobs(deployment, [blob], maker.blob_path, 20, lambda sent, total: None) == 17
        assert connection.send_blobs(deployment, [blob], maker.blob_path, 20, lambda sent, total: None) == 0


@pytest.mark.slow
def test_uploads_that_stop_in_the_middle(own_worker: WorkerEndpoint, maker: ProgramMaker) -> None:
    blobs = [maker.blob(bytes([number])) for number in range(MAXIMUM_UPLOADS + 1)]

    def stops(deployment: str, blob: BlobSpec) -> Iterator[bytes]:
        yield first(deployment, blob)
        yield from silence()

    with RawCaller(own_worker) as caller, watched(own_worker) as (connection, deployment):
        named = [message_of(pb.Blob, blob) for blob in blobs]
        connection._call(pb.MissingBlobsRequest(deployment=deployment, blobs=named), 20)
        start = time.monotonic()
        calls = [caller.begin(METHODS["PutBlob"].path, stops(deployment, blob)) for blob in blobs]
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        codes = Counter(call.code().name for call in calls)
        assert codes == {"FAILED_PRECONDITION": 1, "CANCELLED": MAXIMUM_UPLOADS}
        assert time.monotonic() - start < control_service.UPLOAD_SILENCE_SECONDS + 10
        connection.send_blobs(deployment, blobs, maker.blob_path, 20, lambda sent, total: None)


def copied(message: Any, **fields: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(made, name)[:] = value
        else:
            setattr(made, name, value)
    return made


def more_routes(request: pb.LoadStagesRequest, count: int) -> None:
    leaving = next(route for route in request.routes if route.source == A)
    request.routes.extend([copied(leaving, destination=f"m{number % 60}") for number in range(count)])


def more_stages(request: pb.LoadStagesRequest, count: int) -> None:
    for number in range(count):
        stage = copied(request.stages[0], name=f"s{number}")
        stage.outputs[0].name = f"o{number}"
        request.stages.append(stage)


def more_turns(request: pb.LoadStagesRequest, count: int) -> None:
    for each in request.stages:
        each.turns[:] = [0] * 840
    for route in request.routes:
        route.period, route.remainders[:] = 840, list(range(840))
    more_routes(request, count)


@pytest.mark.parametrize(
    ("change", "count", "words"),
    [
        (more_routes, 30_000, "30002 routes, at most 4096"),
        (more_stages, 12_000, "12001 stages, at most 256"),
        (more_turns, 4_000, "in 840 turns, and their product may be 524288"),
    ],
)
def test_a_program_of_absurd_size_is_refused_at_once(
    workers: LocalWorkers, maker: ProgramMaker, honest: None, change: Any, count: int, words: str
) -> None:
    request = load_request("", machine_plan(one_stage(maker), A), {})
    change(request, count)
    with watched(workers.endpoints[A]) as (connection, deployment):
        request.deployment = deployment
        start = time.monotonic()
        with pytest.raises(ProtocolError, match=words):
            connection._call(request, 20)
        assert time.monotonic() - start < PROMPT_SECONDS


@pytest.mark.parametrize(("change", "count"), [(more_routes, 4000), (more_turns, 600)])
def test_the_largest_program_that_is_taken_holds_nobody_up(
    workers: LocalWorkers, maker: ProgramMaker, honest: None, change: Any, count: int
) -> None:
    program = one_stage(maker)
    request = load_request("", machine_plan(program, A), {})
    change(request, count)
    for source, destination in plan_from_request(request).links:
        request.link_secrets.add(source=source, destination=destination, secret=bytes(LINK_SECRET_BYTES))
    with watched(workers.endpoints[A]) as (connection, deployment):
        request.deployment = deployment
        connection.send_blobs(deployment, program.stages[0].blobs, maker.blob_path, 20, lambda sent, total: None)
        start = time.monotonic()
        connection._call(request, 20)
        assert time.monotonic() - start < 2 * PROMPT_SECONDS
        prompt(workers.endpoints[A])


def test_loading_stops_when_nobody_waits_any_more(own_worker: WorkerEndpoint, maker: ProgramMaker) -> None:
    program = one_stage(maker)
    request = load_request("", machine_plan(program, A), {})
    more_stages(request, 255)
    with watched(own_worker) as (connection, deployment):
        request.deployment = deployment
        connection.send_blobs(deployment, program.stages[0].blobs, maker.blob_path, 20, lambda sent, total: None)
        with pytest.raises(DeadlineError):
            connection._call(request, 0.03)
        time.sleep(1.0)
        with pytest.raises(ProtocolError, match="no stages loaded"):
            connection.statistics(deployment)


@pytest.fixture
def own_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A]) as started:
        yield started


@pytest.fixture
def own_worker(own_workers: LocalWorkers) -> WorkerEndpoint:
    return own_workers.endpoints[A]


@pytest.mark.parametrize("files", [pytest.param(1024, marks=pytest.mark.slow), 4096])
def test_connections_that_say_nothing(tmp_path: Path, files: int) -> None:
    """With too few files for all of them, the others wait until they are closed."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tvm_split.rpc_runtime.worker", "--cache", str(tmp_path), "--ready-json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, files)),
    )
    assert worker.stdout is not None
    address = json.loads(worker.stdout.readline())["address"]
    host, _, port = address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), 10) for _ in range(1500)]
    start = time.monotonic()

    def answered() -> bool:
        with contextlib.suppress(WorkerError):
            describe(WorkerEndpoint("x", address), 5)
            return True
        return False

    assert wait_for(answered, seconds=40)
    assert time.monotonic() - start < (PROMPT_SECONDS if files > 1500 else 20)
    for each in silent:
        each.close()
    worker.kill()
    worker.wait()


def test_calls_without_a_token_take_no_threads(own_workers: LocalWorkers) -> None:
    """Each would take its turn with those that compute and send; the thread that takes calls in refuses them."""
    worker = own_workers.endpoints[A]
    describe(worker, 20)
    before = threads(own_workers.process_ids[A])
    with RawCaller(replace(worker, token="wrong")) as caller:
        assert caller.codes(METHODS["Describe"].path, [b""] * 2000) == {"UNAUTHENTICATED": 2000}
        assert "token is wrong or missing" in caller.answer(METHODS["Describe"].path, [b""])[1]
    assert threads(own_workers.process_ids[A]) <= before + 3  # gRPC's own come and go
