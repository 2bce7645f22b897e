"""The emulated slow network is at least as slow as requested; a busy machine may make it slower."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from tvm.relax import op

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import describe
from tests.helpers.relay import Relay
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.slow_machine import half_speed

BYTES_PER_SECOND = 50e6 / 8
LATENCY_SECONDS = 0.01


@pytest.fixture
def maker(tmp_path: Path) -> ProgramMaker:
    return ProgramMaker(tmp_path / "blobs")


@pytest.fixture
def echo() -> Iterator[str]:
    """Send everything back, on every connection."""

    def answer(connection: socket.socket) -> None:
        with connection:
            while content := connection.recv(1 << 16):
                connection.sendall(content)

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def dial(address: str) -> socket.socket:
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(1 << 16)
        assert part, f"the connection ended after {len(content)} of {size} bytes"
        content += part
    return content


def exchange_seconds(connection: socket.socket, content: bytes) -> float:
    start = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(content,))
    sender.start()
    assert receive(connection, len(content)) == content
    sender.join()
    return time.monotonic() - start


def test_a_relay_has_the_latency_asked_for(echo: str) -> None:
    with Relay(echo, latency_seconds=LATENCY_SECONDS) as relay, dial(relay.address) as connection:
        assert exchange_seconds(connection, b"x") >= 2 * LATENCY_SECONDS


@pytest.mark.parametrize("connections", [1, 3])
def test_all_connections_of_a_relay_share_its_bandwidth(echo: str, connections: int) -> None:
    content = os.urandom(3_000_000 // connections)
    with Relay(echo, bytes_per_second=BYTES_PER_SECOND) as relay, ThreadPoolExecutor(connections) as threads:
        dialled = [dial(relay.address) for _ in range(connections)]
        start = time.monotonic()
        list(threads.map(lambda connection: exchange_seconds(connection, content), dialled))
        assert 3_000_000 / (time.monotonic() - start) <= 1.3 * BYTES_PER_SECOND
        for connection in dialled:
            connection.close()


@pytest.mark.slow
def test_a_machine_of_half_speed_computes_and_is_heard(maker: ProgramMaker) -> None:
    x = maker.input("x", (500, 500))
    program = maker.program([maker.stage("product", "machine", [x], lambda v: [op.matmul(v, v)])])
    inputs = [np.ones((500, 500), np.float32)]
    core = max(os.sched_getaffinity(0))
    with LocalWorkers(["machine"]) as workers:
        worker = psutil.Process(workers.process_ids["machine"])
        with (
            Session(program, workers.endpoints, maker.blob_path) as pipeline,
            half_speed(worker.pid, [core]),
        ):
            assert len(list(pipeline.stream(itertools.repeat(inputs, 100)))) == 100
            assert worker.cpu_affinity() == [core]
            assert describe(workers.endpoints["machine"], 20.0).process_id == worker.pid
