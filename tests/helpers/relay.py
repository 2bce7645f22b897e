"""A slow network on this host: forwards TCP connections, with a bandwidth and a latency for each direction.

``Relay`` runs it in a process of its own, so that neither the test nor the measured processes disturb its timing. All
connections share the bandwidth, as they share a cable: a chunk leaves when the data before it have been sent, and
arrives ``latency_seconds`` later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

CHUNK_BYTES = 16 * 1024
"""The size of a chunk: less than 3 ms of a link of 50 Mbit/s, short enough that connections share it fairly. Unlike a
cable, each chunk wakes this process and the receiver, which takes time from the cores of the measured processes."""
SOCKET_BYTES = 64 * 1024
"""Small buffers, so that a sender soon notices that the wire is full."""
QUEUED_SECONDS = 0.005


class Wire:
    """One direction of a link; ``bytes_per_second`` 0 is without limit."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._free_at = 0.0

    def send(self, size_bytes: int, now: float) -> float:
        """When a chunk that is sent now arrives."""
        seconds = size_bytes / self._bytes_per_second if self._bytes_per_second else 0.0
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at + self._latency_seconds

    def busy_seconds(self, now: float) -> float:
        return self._free_at - now

    def limit(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second


async def carry(wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one direction of a connection until its sender has ended."""
    arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            arrival, chunk = await arriving.get()
            await asyncio.sleep(arrival - time.monotonic())
            if not chunk:
                writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()

    delivery = asyncio.create_task(deliver())
    try:
        while not delivery.done():
            chunk = await reader.read(CHUNK_BYTES)
            arriving.put_nowait((wire.send(len(chunk), time.monotonic()), chunk))
            if not chunk:
                break
            waiting = wire.busy_seconds(time.monotonic()) - QUEUED_SECONDS
            if waiting > 0:
                await asyncio.sleep(waiting)
        await delivery
    finally:
        delivery.cancel()


async def both(*directions: Coroutine[Any, Any, None]) -> None:
    """Run both until both have ended, or one has failed."""
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def serve(target: str, bytes_per_second: float, latency_seconds: float) -> None:
    """Print the port on which it listens, and forward connections until standard input ends.

    A line of standard input is another limit of the bytes per second.
    """
    host, _, port = target.rpartition(":")
    forward, backward = (Wire(bytes_per_second, latency_seconds) for _ in range(2))
    connections: set[asyncio.Task[None] | None] = set()
    """Held here, since nothing else does: while a connection is idle, its task would be collected as garbage."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(task := asyncio.current_task())
        with contextlib.suppress(OSError):
            try:
                far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=CHUNK_BYTES)
                try:
                    await both(carry(forward, reader, far_writer), carry(backward, far_reader, writer))
                finally:
                    far_writer.close()
            finally:
                writer.close()
                connections.discard(task)

    listening = socket.create_server(("127.0.0.1", 0))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listening.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    ended = asyncio.Event()

    def read_limit() -> None:
        line = sys.stdin.readline()
        if not line:
            ended.set()
        for wire in (forward, backward) if line else ():
            wire.limit(float(line))

    asyncio.get_running_loop().add_reader(0, read_limit)
    server = await asyncio.start_server(accept, sock=listening, limit=CHUNK_BYTES)
    print(listening.getsockname()[1], flush=True)
    await ended.wait()
    server.close()


class Relay:
    """A relay to ``target`` (HOST:PORT), at ``address``. A context manager; it ends with this process at the latest."""

    def __init__(self, target: str, *, bytes_per_second: float = 0.0, latency_seconds: float = 0.0) -> None:
        command = [sys.executable, __file__, target, str(bytes_per_second), str(latency_seconds)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        try:
            self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"
        except BaseException:
            self.close()
            raise

    def freeze(self) -> None:
        """Stop forwarding without ending connections, as if a cable behind a switch were unplugged."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def limit(self, bytes_per_second: float) -> None:
        """Let all connections together send so many bytes per second in each direction; 0 is without limit."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{bytes_per_second}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End all connections, as if the other end had crashed."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("bytes_per_second", type=float)
    parser.add_argument("latency_seconds", type=float)
    arguments = parser.parse_args()
    # select() waits to the microsecond, epoll only to the millisecond.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(arguments.target, arguments.bytes_per_second, arguments.latency_seconds))
