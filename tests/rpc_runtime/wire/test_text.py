"""Text of a peer is cleaned wherever it is shown, logged or raised."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from rpc_runtime.client.result_queue import array_slot
from rpc_runtime.client.watch import WorkerWatch
from rpc_runtime.client.worker_client import WorkerClient, describe
from rpc_runtime.errors import ProtocolError, TvmSplitError
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.links import OutgoingLink
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import LINK_PATH
from rpc_runtime.wire.framing import PROTOCOL_VERSION, error_frame
from rpc_runtime.wire.messages import hello_of
from rpc_runtime.wire.text import MAXIMUM_LETTERS, CleanFormatter, cleaned
from tests.helpers.rpc_runtime.hostile_worker import HostileWorker
from tests.helpers.rpc_runtime.joined_links import Idle
from tests.helpers.rpc_runtime.raw_calls import METHODS
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

EVIL = "\x1b]0;owned\x07\x1b[2J\rerror: \u202egnorw\u2066\x9b31m\nall is well\u2028\x00"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\rerror: \u202egnorw\u2066\x9b31m\nall is well\u2028\x00"
DESCRIPTION = pb.DescribeReply(
    protocol_version=PROTOCOL_VERSION,
    machine=EVIL,
    hostname=EVIL * 1000,
    cpu_features=[EVIL, "avx2"],
    cuda_devices=[pb.CudaDevice(index=0, arch=EVIL, memory_bytes=1)],
)


def test_a_description_is_cleaned() -> None:
    with HostileWorker("box", {METHODS["Describe"].path: lambda *_: iter([DESCRIPTION.SerializeToString()])}) as worker:
        description = describe(worker.endpoint, PATIENCE_SECONDS)
    assert (description.machine, description.cuda_devices[0].arch) == (SHOWN, SHOWN)
    assert description.cpu_features == (SHOWN, "avx2")
    assert description.hostname.isprintable()
    assert description.hostname.endswith("…")
    assert len(description.hostname) < 7 * MAXIMUM_LETTERS


@pytest.mark.parametrize("kind", [pb.Failure.STAGE, None], ids=["a stage fails", "it leaves"])
def test_a_watched_failure_is_cleaned(kind: Any) -> None:
    def watch(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield pb.WatchEvent().SerializeToString()
        if kind is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, EVIL)
        failure = pb.Failure(kind=kind, message=EVIL, peer=EVIL)
        yield pb.WatchEvent(failure=failure).SerializeToString()

    raised: list[TvmSplitError] = []
    with (
        HostileWorker("box", {METHODS["Watch"].path: watch}) as worker,
        contextlib.closing(WorkerClient(worker.endpoint, "0" * 32)) as connection,
        contextlib.closing(WorkerWatch({"box": connection}, lambda failure: raised.append(failure.error))) as watching,
    ):
        try:
            watching.start()
            eventually(lambda: bool(raised), "the failure is reported")
        except TvmSplitError as error:  # before the start has finished
            raised.append(error)
    assert SHOWN in str(raised[0])
    assert str(raised[0]).isprintable()


def test_the_end_of_a_stream_is_cleaned() -> None:
    with HostileWorker("box", {LINK_PATH: lambda requests, context: iter([error_frame(EVIL)])}) as worker:
        link = OutgoingLink(Idle(), [], flat_bytes, array_slot)
        call = LinkCall(worker.endpoint, None, hello_of("0" * 32, CLIENT, "box"), link, lambda machine, error: None)
        with pytest.raises(ProtocolError) as caught:
            call.wait_accepted(10)
        assert str(caught.value) == f"{worker.endpoint}: {SHOWN}"
        call.close()


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("", "conv_1", "Größe 3 µs, 中文, e\u0301", "x" * MAXIMUM_LETTERS, r"\x1b"):
        assert cleaned(text) == text
    assert cleaned("x" * (MAXIMUM_LETTERS + 1)) == "x" * (MAXIMUM_LETTERS - 1) + "…"


def test_a_worker_logs_no_words_of_a_caller_as_they_came() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(CleanFormatter())
    logger = logging.Logger("worker")
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(EVIL)
        except ValueError as error:
            raise RuntimeError("then this") from error
    except RuntimeError as error:
        logger.error("a call of %s failed", EVIL, exc_info=error)
    lines = written.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith(f" error: a call of {SHOWN} failed")
    assert {f"ValueError: {SHOWN}", "RuntimeError: then this"} <= set(lines)
    assert any("test_text.py" in line for line in lines)
