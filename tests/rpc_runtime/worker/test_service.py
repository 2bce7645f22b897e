"""Requests that are none, or ask for what nobody needs, are refused and leave nothing behind."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import BlobError, DeadlineError, ProtocolError
from rpc_runtime.program.machine_plan import machine_plan
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.framing import CHUNK_BYTES
from rpc_runtime.wire.messages import LINK_SECRET_BYTES, load_request, plan_from_request
from tests.helpers.rpc_runtime.methods import METHODS
from tests.helpers.rpc_runtime.pipelines import send_blobs, watched
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, one_stage
from tests.helpers.rpc_runtime.raw_calls import RawCaller, begin_upload
from tests.helpers.waiting import PATIENCE_SECONDS


def test_a_blob_belongs_to_a_deployment(workers: LocalWorkers, maker: ProgramMaker, honest: None) -> None:
    blob = maker.blob(b"a blob of its own")
    chunk = pb.PutBlobRequest(chunk=b"a blob of its own").SerializeToString()
    with RawCaller(workers.endpoints[A]) as caller, watched(workers.endpoints[A]) as (connection, deployment):
        code, words = caller.answer(METHODS["PutBlob"].path, [begin_upload("0" * 32, blob), chunk])
        assert (code, "watch it first" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, words = caller.answer(METHODS["PutBlob"].path, [begin_upload(deployment, blob), chunk])
        assert (code, "none that deployment" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert send_blobs(connection, deployment, [blob], maker) == 17
        assert send_blobs(connection, deployment, [blob], maker) == 0


def test_blobs_that_come_in_one_call(workers: LocalWorkers, maker: ProgramMaker) -> None:
    """Large, empty and small ones, each complete before the next; those before one that cannot be read are there."""
    contents = [b"l" * (CHUNK_BYTES + 7), b"", b"small"]
    blobs = [maker.blob(content + bytes([1]) if content else content) for content in contents]
    sent: list[int] = []
    with watched(workers.endpoints[A]) as (connection, deployment):
        on_progress = lambda size, total: sent.append(size)  # noqa: E731
        total = connection.send_blobs(deployment, blobs, maker.blob_path, PATIENCE_SECONDS, on_progress)
        assert total == sum(blob.size_bytes for blob in blobs) == sent[-1]
        assert sent == sorted(sent)
        assert send_blobs(connection, deployment, blobs, maker) == 0
        first, lost, last = (maker.blob(content) for content in (b"first", b"lost", b"last"))
        maker.blob_path(lost.sha256).unlink()
        with pytest.raises(BlobError, match=f"cannot read blob {lost.sha256[:12]} from .*No such file"):
            send_blobs(connection, deployment, [first, lost, last], maker)
        assert send_blobs(connection, deployment, [first, last], maker) == 4
        assert connection.describe(PATIENCE_SECONDS)


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


def longer_turns(request: pb.LoadStagesRequest, count: int) -> None:
    """Of the stage only: its routes have every micro-batch of that many."""
    for each in request.stages:
        each.turns[:] = [0] * 840
    more_routes(request, count)


def too_long_turns(request: pb.LoadStagesRequest, count: int) -> None:
    request.stages[0].turns[:] = [0] * count


@pytest.mark.parametrize(
    ("change", "count", "words"),
    [
        (more_routes, 10_000, "10002 routes, at most 4096"),
        (more_stages, 12_000, "12001 stages, at most 256"),
        (more_turns, 4_000, "3361680 turns of routes, at most 524288"),
        (longer_turns, 4_000, "3363360 turns together, of 840 micro-batches, and may have 524288"),
        (too_long_turns, 8_000_000, "8000000 turns of a stage, at most 16384"),
    ],
)
def test_a_program_of_absurd_size_is_refused(
    workers: LocalWorkers, maker: ProgramMaker, honest: None, change: Any, count: int, words: str
) -> None:
    request = load_request("", machine_plan(one_stage(maker), A), {})
    change(request, count)
    with watched(workers.endpoints[A]) as (connection, deployment):
        request.deployment = deployment
        with pytest.raises(ProtocolError, match=words):
            connection._call(request, PATIENCE_SECONDS)


@pytest.mark.parametrize(("change", "count"), [(more_routes, 4000), (more_turns, 600)])
def test_the_largest_program_is_taken(
    workers: LocalWorkers, maker: ProgramMaker, honest: None, change: Any, count: int
) -> None:
    program = one_stage(maker)
    request = load_request("", machine_plan(program, A), {})
    change(request, count)
    for source, destination in plan_from_request(request).links:
        request.link_secrets.add(source=source, destination=destination, secret=bytes(LINK_SECRET_BYTES))
    with watched(workers.endpoints[A]) as (connection, deployment):
        request.deployment = deployment
        send_blobs(connection, deployment, program.stages[0].blobs, maker)
        connection._call(request, PATIENCE_SECONDS)
        assert connection.describe(PATIENCE_SECONDS)


def test_loading_stops_when_nobody_waits_any_more(own_worker: WorkerEndpoint, maker: ProgramMaker) -> None:
    program = one_stage(maker)
    request = load_request("", machine_plan(program, A), {})
    more_stages(request, 255)
    with watched(own_worker) as (connection, deployment):
        request.deployment = deployment
        send_blobs(connection, deployment, program.stages[0].blobs, maker)
        with pytest.raises(DeadlineError):
            connection._call(request, 0.03)
        time.sleep(1.0)
        with pytest.raises(ProtocolError, match="no stages loaded"):
            connection.statistics(deployment, PATIENCE_SECONDS)
