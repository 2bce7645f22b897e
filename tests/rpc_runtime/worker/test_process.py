"""The worker's process: how it starts, rejects options, and ends."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import describe
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.worker.process import main
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.rpc_runtime.raw_calls import METHODS, RawCaller
from tests.helpers.rpc_runtime.worker_process import ROOT, Start, ready
from tests.helpers.waiting import PATIENCE_SECONDS, stopped


def test_of_tvm_the_runtime_alone_is_loaded() -> None:
    code = (
        "import sys; from rpc_runtime.worker.runtime_alone import load_runtime; load_runtime()\n"
        "import tvm; from tvm.runtime.vm import VirtualMachine; tvm.cpu(), tvm.cuda, tvm.runtime.load_module\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('tvm.')})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"ir", "tirx", "te", "script", "target", "relax"} & set(result.stdout.split())


def test_a_client_needs_no_tvm() -> None:
    names = ("client.session", "client.local_workers", "worker.process")
    modules = ", ".join(f"rpc_runtime.{name}" for name in names)
    code = f"import sys, {modules}; print('tvm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("level", ["info", "warning"])
def test_a_worker_logs_what_it_is_told_to(start: Start, level: str) -> None:
    process = start("--json", "--insecure", "--log-level", level)
    with RawCaller(WorkerEndpoint(A, ready(process))) as caller:
        request = pb.ObserveRequest(deployment="\x1b[2J\nerror: gone")
        code = caller.code(METHODS["Observe"].path, [request.SerializeToString()])
        assert code is grpc.StatusCode.FAILED_PRECONDITION
    process.terminate()
    warning, *refusals = process.communicate(timeout=PATIENCE_SECONDS)[1].splitlines()
    assert re.fullmatch(r"[-0-9]+ [:,0-9]+ warning: listening on 127.0.0.1:0 without .*", warning)
    assert len(refusals) == (level == "info")
    for line in refusals:
        assert re.fullmatch(r"[-0-9]+ [:,0-9]+ info: refused ipv4:127.0.0.1:[0-9]+: this worker has no .*", line)
        assert line.isprintable()


def test_a_worker_describes_its_machine(workers: LocalWorkers) -> None:
    description = describe(workers.endpoints[A], PATIENCE_SECONDS)
    assert (description.machine, description.process_id, description.threads) == (A, workers.process_ids[A], 1)
    assert description.architecture == os.uname().machine
    assert description.hostname == socket.gethostname()
    assert 0 < description.memory_free_bytes <= description.memory_total_bytes
    assert description.tvm_version.startswith("0.27")
    assert description.cores >= 1
    assert not description.secure
    assert abs(description.clock_offset_nanoseconds) <= description.round_trip_seconds * 1e9


@pytest.mark.parametrize("cause", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, "parent"])
def test_it_ends_cleanly(start: Start, cause: int | str) -> None:
    process = start("--exit-with-parent")
    ready(process)
    if isinstance(cause, int):
        process.send_signal(cause)
    else:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_worker_under_nohup_stays(start: Start) -> None:
    process = start("--json", within=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    address = ready(process)
    process.send_signal(signal.SIGHUP)
    assert describe(WorkerEndpoint(A, address), PATIENCE_SECONDS).process_id == process.pid


def test_a_limit_of_open_files_that_is_too_low_is_named(start: Start) -> None:
    process = start("--json", within=("sh", "-c", 'ulimit -n 16; exec "$@"', "sh"))
    assert process.wait(PATIENCE_SECONDS) == 1
    assert process.stderr is not None
    assert re.fullmatch(
        r"error: a worker needs \d+ .* 16 are allowed. Raise .* \(ulimit -n\).*\n", process.stderr.read()
    )


def test_it_ends_at_once_where_its_parent_gives_it_nothing_to_read(tmp_path: Path) -> None:
    """The null device, which epoll does not accept, is at its end from the start."""
    command = [sys.executable, "-m", "rpc_runtime.worker", "--cache", str(tmp_path), "--exit-with-parent"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(ended.stdout)["address"]


def test_what_prints_while_it_imports_does_not_reach_its_ready_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins\nimported = builtins.__import__\ndef noisy(name, *others, **named):\n"
        "    if name in ('numpy', 'grpc'): print('noise')\n    return imported(name, *others, **named)\n"
        "builtins.__import__ = noisy\n"
    )
    process = start("--json", PYTHONPATH=str(tmp_path))
    assert ready(process)
    process.terminate()
    assert "noise" in process.communicate(timeout=PATIENCE_SECONDS)[1]


def test_a_port_in_use_is_one_clear_line(start: Start) -> None:
    address = ready(start("--json"))
    second = start("--listen", address)
    assert second.wait(PATIENCE_SECONDS) == 1
    assert second.stderr is not None
    assert second.stderr.read().splitlines() == [f"error: cannot listen on {address}: Address already in use"]


def test_ranges_for_nsight_need_their_package(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nvtx.py").write_text("raise ImportError")
    worker = start("--nvtx", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert worker.wait(PATIENCE_SECONDS) != 0
    assert worker.stderr is not None
    assert "pip install nvtx" in worker.stderr.read()


def test_a_host_that_cannot_be_resolved_is_named(start: Start) -> None:
    worker = start("--listen", "nohost.invalid:7995", "--insecure")
    assert worker.wait(PATIENCE_SECONDS) == 1
    assert worker.stderr is not None
    error = worker.stderr.read().splitlines()[-1]
    assert error.startswith("error: cannot listen on nohost.invalid:7995: ")
    assert "Unknown error" not in error


@pytest.mark.parametrize("gigabytes", [1.3, *(pytest.param(size, marks=pytest.mark.slow) for size in (0.4, 0.8, 1.6))])
def test_with_too_little_memory_it_answers_or_says_why(start: Start, maker: ProgramMaker, gigabytes: float) -> None:
    limit = ("sh", "-c", f'ulimit -v {int(gigabytes * 1e6)}; exec "$@"', "sh")
    process = start("--json", "--insecure", "--name", A, within=limit)
    assert process.stdout is not None
    assert process.stderr is not None
    if line := process.stdout.readline():
        program = one_stage(maker)
        endpoint = WorkerEndpoint(A, json.loads(line)["address"])
        with Session(Opening(program, {A: endpoint}, maker.blob_path)) as session:
            session.run(batches_for(program, 1)[0])
    else:
        assert process.wait(PATIENCE_SECONDS) != 0
        assert process.stderr.read().strip()


AT_A_TRACKER = ["--tracker", "127.0.0.1:9190", "--key", "lab"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--log-level", "loud"], "invalid choice: 'loud'"),
        (["--listen", "nonsense"], "HOST:PORT"),
        (["--metrics-listen", "0.0.0.0:0"], "--tls-certificate and --tls-key, or --insecure"),
        (["--name", "client"], "--name client"),
        (["--threads", "0"], "--threads is at least 1"),
        (["--cores", "a"], "--cores takes numbers"),
        (["--cores", "4000"], "--cores takes numbers of"),
        (["--tls-key", "x"], "belong together"),
        (["--tls-certificate", "nothing.pem", "--tls-key", "nothing.pem"], "cannot read the TLS file"),
        (["--token-file", "nothing"], "cannot read the token file"),
        (["--token-file", sys.executable], "is not a text file"),
        (["--key", "lab"], "--key belongs to --tracker"),
        (["--tracker", "127.0.0.1:9190"], "--tracker needs --key as well"),
        (["--tracker", "tracker", "--key", "lab"], "an address is HOST:PORT"),
        (["--tracker", "127.0.0.1:9190", "--key", "a:b"], "without colon or blank"),
        (["--tracker", "192.0.2.1:9190", "--key", "lab"], "cannot reach 127.0.0.1:0: listen on an address of"),
        ([*AT_A_TRACKER, "--advertise", "http://box"], "a host is a name or a numeric address"),
        ([*AT_A_TRACKER, "--tuning-port", "7000"], "give --insecure-tuning"),
        ([*AT_A_TRACKER, "--insecure", "--tuning-port", "70000"], "from 0 to 65535"),
    ],
)
def test_wrong_use_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(io.StringIO(), arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert words in message
    assert message.count("\n") == 1


def test_a_worker_that_has_just_been_continued_ends_when_it_is_told_to(start: Start) -> None:
    """The system may then choose another thread for the signal, and the main thread sleeps on."""
    processes = [start("--json") for _ in range(3)]
    for process in processes:
        ready(process)
        with stopped(process.pid):
            pass
        process.terminate()
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0, 0]
