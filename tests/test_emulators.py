"""The emulated slow network is at least as slow as requested; a busy machine may make it slower."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.relay import Relay


@pytest.mark.parametrize(
    ("settings", "size_bytes", "connections", "least_seconds"),
    [
        ({"latency_seconds": 0.01}, 1, 1, 0.02),
        *(({"bytes_per_second": 6e6}, 1_500_000, connections, 0.5 / 1.3) for connections in (1, 3)),
    ],
)
def test_connections_of_a_relay_share_its_bandwidth_and_have_its_latency(
    settings: dict[str, float], size_bytes: int, connections: int, least_seconds: float
) -> None:
    def answer() -> None:
        """Send the content back when everything has arrived."""
        with server.accept()[0] as connection, connection.makefile("rwb") as file:
            file.write(file.read())

    def exchanged(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()

    content = os.urandom(size_bytes // connections)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(2 * connections) as threads,
        Relay(f"127.0.0.1:{server.getsockname()[1]}", **settings) as relay,
    ):
        start = time.monotonic()
        for _ in range(connections):
            threads.submit(answer)
        ports = [int(relay.address.partition(":")[2])] * connections
        assert list(threads.map(exchanged, ports)) == [content] * connections
        assert time.monotonic() - start >= least_seconds
