"""What a hop could cost at best: copying, shared memory and sockets, without the project; a partner of `bench_links`.

Two processes on the cores of two workers. For each message the sender computes, notes the time and hands it over; the
receiver reads the same clock when it has all. Memory is that of as many messages as a link has under way, in turn.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from scripts.partner import answer_requests
from scripts.rounds import two_cores

MEMCPY, MEMORY, UNIX, TCP = KINDS = ("memcpy", "memory, unix socket", "unix socket", "tcp socket")
PLACES = 3
WARM_UP, FEWEST = 10, 40
"""Messages whose processor time does not count, and how many there are at least."""
WORD = struct.Struct("<q")
"""When a message left, in nanoseconds of the host's clock; 0 is the end."""
CREDIT = b"c"
MATRIX = np.ones((256, 256), np.float32)

Places = Sequence["np.ndarray[Any, Any]"]


class Sender:
    """Has ``payload`` to say for so many seconds, again and again, and computes before each time."""

    def __init__(self, payload: np.ndarray[Any, Any], seconds: float, computing_seconds: float) -> None:
        self.payload = payload
        self.count = 0
        self.computed_seconds = 0.0
        self._end = time.perf_counter() + seconds
        self._computing_seconds = computing_seconds
        self._begun = time.process_time()

    def computes(self) -> bool:
        """Computes for the next message; whether there is to be one."""
        if self.count >= FEWEST and time.perf_counter() > self._end:
            return False
        if self.count == WARM_UP:
            self._begun, self.computed_seconds = time.process_time(), 0.0
        start = time.process_time()
        while time.process_time() - start < self._computing_seconds:
            MATRIX @ MATRIX
        self.computed_seconds += time.process_time() - start
        self.count += 1
        return True

    @property
    def processor_seconds(self) -> float:
        """For one message, without the computing."""
        return (time.process_time() - self._begun - self.computed_seconds) / (self.count - WARM_UP)


def copy(sender: Sender, places: Places) -> dict[str, float]:
    latencies, first = [], time.monotonic_ns()
    while sender.computes():
        start = time.monotonic_ns()
        places[sender.count % PLACES][:] = sender.payload
        latencies.append(time.monotonic_ns() - start)
    return {**figures(latencies, time.monotonic_ns() - first), "processor_seconds": sender.processor_seconds}


def send(sender: Sender, connection: socket.socket, places: Places, shared: bool) -> None:
    """To memory that the receiver sees, if that is ``shared``, else through the socket."""
    while sender.computes():
        word = WORD.pack(time.monotonic_ns())
        if shared:
            if sender.count > PLACES:
                connection.recv(1)
            places[sender.count % PLACES][:] = sender.payload
            connection.sendall(word)
        else:
            sent = connection.sendmsg([word, sender.payload.data])
            connection.sendall(sender.payload.data[sent - WORD.size :])
    connection.sendall(WORD.pack(0))


def receive(connection: socket.socket, places: Places, shared: bool, results: Connection) -> None:
    """Sends its figures when the sender ends."""
    begun, first, latencies = 0.0, 0, []
    word = bytearray(WORD.size)
    while connection.recv_into(word, 0, socket.MSG_WAITALL) and (start := WORD.unpack(word)[0]):
        if not shared:
            connection.recv_into(places[len(latencies) % PLACES], 0, socket.MSG_WAITALL)
        latencies.append(time.monotonic_ns() - start)
        first = first or start
        if len(latencies) == WARM_UP:
            begun = time.process_time()
        if shared:
            with contextlib.suppress(BrokenPipeError):  # the sender has said its last
                connection.send(CREDIT)
    processor_seconds = (time.process_time() - begun) / (len(latencies) - WARM_UP)
    results.send({**figures(latencies, time.monotonic_ns() - first), "processor_seconds": processor_seconds})


def figures(latencies: Sequence[int], nanoseconds: int) -> dict[str, float]:
    return {
        "latency_seconds": statistics.median(latencies) * 1e-9,
        "messages_per_second": len(latencies) / nanoseconds * 1e9,
    }


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    if kind != TCP:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        answering, _ = listener.accept()
    for end in (calling, answering):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return calling, answering


def hop(kind: str, size_bytes: int, computing_seconds: float, seconds: float) -> dict[str, float]:
    """The figures of one way for so many seconds; ``processor_seconds`` of both sides, for a message."""
    block = np.frombuffer(mmap.mmap(-1, max(PLACES * size_bytes, mmap.PAGESIZE)), np.uint8)
    places = [block[place * size_bytes :][:size_bytes] for place in range(PLACES)]
    sender = Sender(np.arange(size_bytes, dtype=np.uint32).astype(np.uint8), seconds, computing_seconds)
    if kind == MEMCPY:
        return copy(sender, places)
    shared, (here, there) = kind == MEMORY, pair(kind)
    taken, given = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_as_receiver, args=(here, there, places, shared, given), daemon=True
    )
    process.start()
    there.close()
    with here:
        send(sender, here, places, shared)
        found: dict[str, float] = taken.recv()
    process.join()
    return {**found, "processor_seconds": found["processor_seconds"] + sender.processor_seconds}


def _as_receiver(senders: socket.socket, own: socket.socket, places: Places, shared: bool, results: Connection) -> None:
    senders.close()
    os.sched_setaffinity(0, {CORES[1]})
    with own:
        receive(own, places, shared, results)


def answer(kind: str, size_bytes: int, computing_seconds: float, seconds: float) -> dict[str, float]:
    beside = hop(kind, size_bytes, computing_seconds, seconds)
    streamed = hop(kind, size_bytes, 0.0, seconds)
    return {
        "latency_seconds": beside["latency_seconds"],
        "bytes_per_second": streamed["messages_per_second"] * size_bytes,
        "processor_seconds": beside["processor_seconds"],
    }


if __name__ == "__main__":
    CORES = two_cores()
    os.sched_setaffinity(0, {CORES[0]})
    answer_requests(answer)
