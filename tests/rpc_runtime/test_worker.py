"""The worker as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpc_runtime.client import WorkerEndpoint, describe
from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.local_workers import LocalWorkers
from rpc_runtime.pipeline import Pipeline
from rpc_runtime.security import TlsFiles
from tests.rpc_runtime.program_maker import ProgramMaker
from tests.rpc_runtime.test_pipeline import A, B, C, batches_for, skips

Start = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rpc_runtime.worker", "--cache", str(tmp_path / "cache"), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["address"])


def test_the_compiler_is_never_loaded(workers: LocalWorkers) -> None:
    maps = Path(f"/proc/{workers.process_ids[A]}/maps").read_text()
    assert "libtvm_runtime.so" in maps
    assert "libtvm_compiler" not in maps
    assert "libtorch" not in maps


def test_a_client_needs_no_tvm() -> None:
    modules = "rpc_runtime.pipeline, rpc_runtime.local_workers, rpc_runtime.worker"
    code = f"import sys, {modules}; print('tvm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "False\n"


def test_a_worker_describes_its_machine(workers: LocalWorkers) -> None:
    found = describe(workers.endpoints[A], 30)
    assert (found.machine, found.process_id, found.threads) == (A, workers.process_ids[A], 1)
    assert found.architecture == os.uname().machine
    assert found.hostname == socket.gethostname()
    assert 0 < found.memory_free_bytes <= found.memory_total_bytes
    assert found.tvm_version.startswith("0.27")
    assert found.cores >= 1
    assert not found.secure
    assert abs(found.clock_offset_nanoseconds) <= found.round_trip_seconds * 1e9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(start: Start, number: int) -> None:
    process = start("--ready-json")
    ready(process)
    process.send_signal(number)
    assert process.wait(20) == 0


def test_it_ends_with_its_parent(start: Start) -> None:
    process = start("--exit-with-parent")
    ready(process)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    assert process.wait(20) == 0


def test_a_port_in_use_is_one_clear_line(start: Start) -> None:
    address = ready(start("--ready-json"))
    second = start("--listen", address)
    assert second.wait(30) == 1
    assert second.stderr is not None
    assert second.stderr.read().splitlines() == [f"error: cannot listen on {address}: Address already in use"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "nonsense"], "HOST:PORT"),
        (["--threads", "0"], "at least one thread"),
        (["--cores", "a"], "--cores takes numbers"),
        (["--cores", "4000"], "cannot run on the cores"),
        (["--tls-key", "x"], "belong together"),
        (["--tls-certificate", "nothing.pem", "--tls-key", "nothing.pem"], "cannot read the TLS file"),
        (["--token-file", "nothing"], "cannot read the token file"),
    ],
)
def test_wrong_use_is_one_clear_line(start: Start, arguments: list[str], words: str) -> None:
    process = start(*arguments)
    assert process.wait(30) == 2
    assert process.stderr is not None
    message = process.stderr.read()
    assert message.startswith("error: ")
    assert words in message
    assert message.count("\n") == 1


def test_an_open_address_needs_a_word_and_gives_a_warning(start: Start) -> None:
    process = start("--listen", "0.0.0.0:0", "--insecure", "--ready-json")
    port = ready(process).rpartition(":")[2]
    assert describe(WorkerEndpoint("x", f"127.0.0.1:{port}"), 30).hostname == socket.gethostname()
    process.terminate()
    assert "warning: listening on 0.0.0.0:0 without TLS" in process.communicate(timeout=30)[1]


def make_certificate(tmp_path: Path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("needs openssl to make a certificate")
    return certificate, key


def test_a_pipeline_over_tls(start: Start, tmp_path: Path, maker: ProgramMaker) -> None:
    """Client and workers, and the workers among themselves, prove who they are; each worker has its own token."""
    certificate, key = make_certificate(tmp_path)
    files = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--tls-ca", str(certificate)]
    endpoints = {}
    for name in (A, B, C):
        process = start(*files, "--ready-json", "--name", name, TVM_SPLIT_TOKEN=f"token-{name}")
        endpoints[name] = WorkerEndpoint(name, ready(process), f"token-{name}", TlsFiles(certificate, certificate, key))
    program = skips(maker)
    with Pipeline.open(program, endpoints, maker.blob_path) as pipeline:
        assert len(list(pipeline.stream(batches_for(program, 10)))) == 10


def test_tls(start: Start, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    files = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--ready-json"]
    address = ready(start(*files, TVM_SPLIT_TOKEN="abc"))
    trusted = TlsFiles(authority=certificate)
    assert describe(WorkerEndpoint("x", address, "abc", trusted), 30).secure
    with pytest.raises(WorkerUnavailableError):
        describe(WorkerEndpoint("x", address, "abc"), 5)
    mutual = ready(start(*files, "--tls-ca", str(certificate)))
    with pytest.raises(WorkerUnavailableError):
        describe(WorkerEndpoint("x", mutual, None, trusted), 5)
    proven = TlsFiles(certificate, certificate, key)
    assert describe(WorkerEndpoint("x", mutual, None, proven), 30).secure
