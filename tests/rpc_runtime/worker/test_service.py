"""Invalid or excessive requests are rejected and leave nothing behind."""

import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import BlobError, DeadlineError, ProtocolError, WorkerError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports import links
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH
from rpc_runtime.wire.framing import CHUNK_BYTES, FrameKind, decode, tensor_frames
from rpc_runtime.wire.messages import load_request
from tests.helpers.rpc_runtime.pipelines import open_on, over_grpc, same, send_blobs, watched
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain, endless, one_stage
from tests.helpers.rpc_runtime.raw_calls import METHODS, RawCaller, begin_upload, hello, silence, speak
from tests.helpers.waiting import PATIENCE_SECONDS


def test_a_blob_belongs_to_a_deployment(workers: LocalWorkers, maker: ProgramMaker, honest: None) -> None:
    blob = maker.blob(b"a blob of its own")
    chunk = pb.PutBlobRequest(chunk=b"a blob of its own").SerializeToString()
    with RawCaller(workers.endpoints[A]) as caller, watched(workers.endpoints[A]) as connection:
        code, words = caller.answer(METHODS["PutBlob"].path, [begin_upload("0" * 32, blob), chunk])
        assert (code, "no deployment" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        assert send_blobs(connection, [blob], maker) == 17
        assert send_blobs(connection, [blob], maker) == 0


def test_blobs_that_come_in_one_call(workers: LocalWorkers, maker: ProgramMaker) -> None:
    """Large, empty and small blobs, each complete before the next one; those before an unreadable one are stored."""
    contents = [b"l" * (CHUNK_BYTES + 7), b"", b"small"]
    blobs = [maker.blob(content + bytes([1]) if content else content) for content in contents]
    sent: list[int] = []
    with watched(workers.endpoints[A]) as connection:
        on_progress = lambda size, total: sent.append(size)  # noqa: E731
        total = connection.send_blobs(blobs, maker.blob_path, PATIENCE_SECONDS, on_progress)
        assert total == sum(blob.size_bytes for blob in blobs) == sent[-1]
        assert sent == sorted(sent)
        assert send_blobs(connection, blobs, maker) == 0
        first, lost, last = (maker.blob(content) for content in (b"first", b"lost", b"last"))
        maker.blob_path(lost.sha256).unlink()
        with pytest.raises(BlobError, match=f"cannot read blob {lost.sha256[:12]} from .*No such file"):
            send_blobs(connection, [first, lost, last], maker)
        assert send_blobs(connection, [first, last], maker) == 4
        assert connection.describe(PATIENCE_SECONDS)


def test_loading_stops_when_nobody_waits_any_more(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = one_stage(maker)
    (stage,) = program.stages
    more = tuple(replace(stage, name=f"s{n}", outputs=(replace(stage.outputs[0], name=f"o{n}"),)) for n in range(255))
    program = replace(program, stages=(stage, *more))
    with watched(workers.endpoints[A]) as connection:
        send_blobs(connection, stage.blobs, maker)
        with pytest.raises(DeadlineError):
            connection._call(load_request(connection.deployment, program, A, {}), 0.03)
        time.sleep(1.0)
        with pytest.raises(ProtocolError, match="no stages loaded"):
            connection.observe(PATIENCE_SECONDS)


def test_what_is_loaded_stands_by_until_it_is_connected(workers: LocalWorkers, maker: ProgramMaker) -> None:
    """A spare has its weights and statistics, waits for inputs, and can be connected once."""
    program = chain(maker)
    part = replace(program, stages=tuple(replace(stage, machine=A) for stage in program.stages))
    with watched(workers.endpoints[A]) as connection:
        send_blobs(connection, [blob for stage in part.stages for blob in stage.blobs], maker)
        assert connection.load(part, {}, PATIENCE_SECONDS) == 64
        with pytest.raises(WorkerError, match="is loaded already"):
            connection.load(part, {}, PATIENCE_SECONDS)
        assert connection.observe(PATIENCE_SECONDS, since=0).rows == b""
        assert connection.connect({}, PATIENCE_SECONDS) == ()
        with pytest.raises(WorkerError, match="is connected already"):
            connection.connect({}, PATIENCE_SECONDS)


def test_a_link_waits_for_its_machine_to_be_connected(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = one_stage(maker)
    with watched(workers.endpoints[A]) as connection, RawCaller(workers.endpoints[A]) as caller:
        send_blobs(connection, program.stages[0].blobs, maker)
        connection.load(program, {}, PATIENCE_SECONDS)
        early = caller.begin(
            LINK_PATH, silence(), PATIENCE_SECONDS, ((HELLO_KEY, hello(connection.deployment, CLIENT, A)),)
        )
        connection.connect({}, PATIENCE_SECONDS)
        assert decode(next(early)).kind is FrameKind.ACCEPT
        early.cancel()


REFUSED, LET_IN = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT


def test_a_link_is_opened_by_its_own_secret_only(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    without_token = replace(workers.endpoints[B], token=None)
    with open_on(workers, program, maker) as pipe, open_on(workers, program, maker) as second_pipe:
        expected = pipe.run(batch)
        deployment, secrets = pipe.deployment, pipe.link_secrets
        assert set(secrets) == {(A, B), (B, C)}
        assert len({*secrets.values(), *second_pipe.link_secrets.values()}) == 4
        secret = secrets[A, B]
        for greeting in (
            hello(deployment, A, B),
            hello(deployment, A, B, secret=b"0" * len(secret)),
            hello(deployment, A, B, secret=secret[:-1]),
            hello(deployment, A, B, secret=secrets[B, C]),
            hello(deployment, A, B, secret=second_pipe.link_secrets[A, B]),
            hello(second_pipe.deployment, A, B, secret=secret),
            hello("0" * 32, A, B, secret=secret),
            hello(deployment, CLIENT, B, secret=secret),
            hello(deployment, B, CLIENT, secret=secret),
            hello(deployment, C, B, secret=secret),
            b"",
        ):
            assert speak(without_token, greeting, silence()) is REFUSED  # before the caller has sent a message
        # The answer then says that the link is already open.
        assert speak(without_token, hello(deployment, A, B, secret=secret)) is LET_IN
        assert speak(without_token, hello(deployment, A, B, secret=secret, version=3)) is LET_IN
        assert (pipe.run(batch)[0] == expected[0]).all()


def test_a_peer_that_breaks_the_protocol_fails_only_its_deployment(
    workers: LocalWorkers, maker: ProgramMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client violates the protocol: its link to the first machine sends invalid frames."""
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    with open_on(workers, program, maker) as good:
        expected = good.run(batch)
        frames = [frame for n in range(50) for frame in tensor_frames(0, n, np.zeros(64, np.uint8))]  # without credit
        monkeypatch.setattr(links.OutgoingLink, "frames", lambda self: iter(frames))
        with pytest.raises(ProtocolError, match=A), open_on(workers, program, maker, links=over_grpc(program)) as bad:
            list(bad.stream(endless(program)))
        monkeypatch.undo()
        assert same(good.run(batch), expected)
