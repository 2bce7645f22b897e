"""What a worker says is shown, and does nothing to the terminal; neither does what a client says to a worker."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import typer

from rpc_runtime.client.client import WorkerConnection, describe
from rpc_runtime.client.result_queue import array_slot
from rpc_runtime.client.watch import WorkerWatch
from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.kernel_times import TimingEffort
from rpc_runtime.program.program import CLIENT
from rpc_runtime.transports.links import OutgoingLink
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.control_methods import CONTROL_SERVICE, DATA_SERVICE, LINK_METHOD
from rpc_runtime.wire.foreign_text import MAXIMUM_LETTERS, CleanFormatter, cleaned
from rpc_runtime.wire.framing import PROTOCOL_VERSION, error_frame
from rpc_runtime.wire.messages import hello_of
from tests.helpers.rpc_runtime.stations import Idle
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.status import status as status_command

EVIL = "\x1b]0;owned\x07\x1b[2J\rerror: \u202egnorw\u2066\x9b31m\nall is well\u2028\x00"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\rerror: \u202egnorw\u2066\x9b31m\nall is well\u2028\x00"

Start = Callable[[dict[str, Any]], WorkerEndpoint]


@pytest.fixture
def hostile() -> Iterator[Start]:
    """Starts a server that answers a worker's methods as it is told; `LINK_METHOD` in raw bytes."""
    servers = []

    def start(answers: dict[str, Any]) -> WorkerEndpoint:
        server = grpc.server(ThreadPoolExecutor(8))
        control = {
            name: grpc.unary_stream_rpc_method_handler(answer, None, lambda reply: reply.SerializeToString())
            for name, answer in answers.items()
        }
        link = {LINK_METHOD: grpc.stream_stream_rpc_method_handler(answers.get(LINK_METHOD), None, None)}
        handlers = [
            grpc.method_handlers_generic_handler(CONTROL_SERVICE, control),
            grpc.method_handlers_generic_handler(DATA_SERVICE, link),
        ]
        server.add_generic_rpc_handlers(handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return WorkerEndpoint("box", f"127.0.0.1:{port}")

    yield start
    for server in servers:
        server.stop(None)


def evil_description(request: bytes, context: Any) -> Iterator[pb.DescribeReply]:
    yield pb.DescribeReply(
        protocol_version=PROTOCOL_VERSION,
        machine=EVIL,
        hostname=EVIL * 1000,
        architecture=EVIL,
        quota_group=EVIL,
        cpu_features=[EVIL, "avx2"],
        tvm_version=EVIL,
        tvm_ffi_version=EVIL,
        numpy_version=EVIL,
        boot_id=EVIL,
        cuda_devices=[pb.CudaDevice(index=0, arch=EVIL, memory_bytes=1)] * 100,
        deployments=[EVIL] * 1000,
    )


def endless_quota(request: bytes, context: Any) -> Iterator[pb.DescribeReply]:
    yield pb.DescribeReply(protocol_version=PROTOCOL_VERSION, core_quota=float("nan"))


def refuses(request: Any, context: Any) -> Iterator[Any]:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, EVIL)
    yield


def test_a_description_is_cleaned(hostile: Start) -> None:
    found = describe(hostile({"Describe": evil_description}), PATIENCE_SECONDS)
    assert (found.machine, found.cpu_features, found.tvm_version) == (SHOWN, (SHOWN, "avx2"), SHOWN)
    assert found.cuda_devices[0].arch == found.deployments[0] == SHOWN
    assert found.hostname.isprintable()
    assert found.hostname.endswith("…")
    assert len(found.hostname) < 7 * MAXIMUM_LETTERS


def test_a_quota_that_is_no_number(hostile: Start) -> None:
    with pytest.raises(ProtocolError, match="quota of nan cores"):
        describe(hostile({"Describe": endless_quota}), PATIENCE_SECONDS)


@pytest.mark.parametrize("answer", [evil_description, refuses])
def test_the_table_of_the_workers_is_clean(hostile: Start, capsys: pytest.CaptureFixture[str], answer: Any) -> None:
    endpoint = hostile({"Describe": answer})
    with contextlib.suppress(typer.Exit):  # 1, where the worker refuses
        status_command(MachineOptions(), address=[endpoint.address], timeout=10.0)
    out, err = capsys.readouterr()
    assert SHOWN in (out if answer is evil_description else err)
    assert all(line.isprintable() for line in (out + err).split("\n"))
    assert len(out) < 50_000
    assert "\nall is well" not in out + err


def test_a_refusal_is_cleaned(hostile: Start) -> None:
    with pytest.raises(WorkerError) as caught:
        describe(hostile({"Describe": refuses}), PATIENCE_SECONDS)
    assert str(caught.value).endswith(SHOWN)


def test_a_failure_that_is_watched_is_cleaned(hostile: Start) -> None:
    begun = threading.Event()

    def fails(request: bytes, context: Any) -> Iterator[pb.WatchEvent]:
        yield pb.WatchEvent()
        begun.wait(PATIENCE_SECONDS)
        yield pb.WatchEvent(failure=pb.Failure(kind=pb.Failure.STAGE, message=EVIL, peer=EVIL, stage=EVIL))

    def leaves(request: bytes, context: Any) -> Iterator[pb.WatchEvent]:
        yield pb.WatchEvent()
        begun.wait(PATIENCE_SECONDS)
        context.abort(grpc.StatusCode.UNAVAILABLE, EVIL)

    for answer in (fails, leaves):
        begun.clear()
        connection = WorkerConnection(hostile({"Watch": answer}))
        raised: list[TvmSplitError] = []
        watch = WorkerWatch("0" * 32, {"box": connection}, {"box": ("one",)}, raised.append, lambda *_: None)
        watch.start(10)
        begun.set()
        assert watch.wait_report(10)
        for thread in watch._threads:
            thread.join(PATIENCE_SECONDS)
        watch.close()
        connection.close()
        assert SHOWN in str(raised[0])
        assert str(raised[0]).isprintable()


def test_what_is_measured_is_cleaned(hostile: Start) -> None:
    def times(request: bytes, context: Any) -> Iterator[pb.TimeKernelsReply]:
        yield pb.TimeKernelsReply(times=[pb.KernelTime(function=EVIL, error=EVIL)])

    def trace(request: bytes, context: Any) -> Iterator[pb.TraceReply]:
        yield pb.TraceReply(events=[pb.TraceEvent(stage=EVIL, kind=EVIL)])

    connection = WorkerConnection(hostile({"TimeKernels": times, "Trace": trace}))
    (time,) = connection.time_kernels("0" * 32, TimingEffort(1, 0.1, 1.0), 10)
    assert (time.function, time.error) == (SHOWN, SHOWN)
    (event,) = connection.trace("0" * 32, 0)
    assert (event.stage, event.kind) == (SHOWN, SHOWN)
    connection.close()


def test_the_end_of_a_stream_is_cleaned(hostile: Start) -> None:
    endpoint = hostile({LINK_METHOD: lambda requests, context: iter([error_frame(EVIL)])})
    link = OutgoingLink(Idle(), [], flat_bytes, array_slot)
    call = LinkCall(endpoint, None, hello_of("0" * 32, CLIENT, "box"), link, lambda machine, error: None)
    with pytest.raises(ProtocolError) as caught:
        call.wait_accepted(10)
    assert str(caught.value) == f"{endpoint}: {SHOWN}"
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
    assert f"ValueError: {SHOWN}" in lines
    assert "RuntimeError: then this" in lines
    assert any("test_foreign_text.py" in line for line in lines)
