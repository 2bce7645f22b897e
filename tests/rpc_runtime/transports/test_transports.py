"""Tests of all transports: order, credits, all sizes and dtypes, and an end that both sides notice.

For MPI this runs as a rank: `test_mpi`.
"""

import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import pytest

from rpc_runtime.errors import ProtocolError, WorkerUnavailableError
from rpc_runtime.program.codecs import CODECS, NONE, fitting
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.credits import OUTBOX
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.liveness import LinkTimeouts
from rpc_runtime.transports.transport import TRANSPORTS, transport_named
from rpc_runtime.wire.framing import CHUNK_BYTES, FrameKind, control_frame, tensor_frames
from tests.helpers.mappings import open_files
from tests.helpers.rpc_runtime import mpi_ranks
from tests.helpers.rpc_runtime.joined_links import (
    SHORT,
    Answering,
    Receiver,
    Sender,
    joined,
    link_threads,
    send_all,
    values,
)
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.toy import FOLDER, toy_plugin_installed
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

TOY = "toy-socket"
"""The transport of an installed package."""
NAMES = ("mpi",) if mpi_ranks.is_rank() else (*(name for name in TRANSPORTS if name != "mpi"), TOY)
every_transport = pytest.mark.parametrize("transport", NAMES)


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_plugin_installed():
        yield


caller_sends = pytest.mark.parametrize("caller_sends", [True, False], ids=["caller sends", "caller receives"])


def routes_of(*specs: tuple[tuple[int, ...], str], depth: int = 3) -> list[Route]:
    return [
        Route(index, TensorSpec(f"t{index}", shape, dtype), "a", "b", depth)
        for index, (shape, dtype) in enumerate(specs)
    ]


def ends(sender: Sender, receiver: Receiver, caller_sends: bool) -> tuple[LinkEnd, LinkEnd]:
    """Return the answering end and the calling end."""
    return (receiver.link, sender.link) if caller_sends else (sender.link, receiver.link)


DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@every_transport
@caller_sends
@pytest.mark.parametrize("reuse", [True, False], ids=["memory reused", "memory kept"])
def test_everything_arrives_whole_and_in_order(transport: str, caller_sends: bool, reuse: bool) -> None:
    sizes = [(0,), (2, 0, 3), (), (1,), (63,), (257, 3), (CHUNK_BYTES + 5,), (3 * CHUNK_BYTES,)]
    routes = routes_of(*((shape, DTYPES[2]) for shape in sizes), *(((7, 3), dtype) for dtype in DTYPES))
    sender, receiver = (
        Sender(routes),
        Receiver(routes, reuse=reuse or transport == "nccl"),
    )  # only a client keeps memory
    with joined(transport, *ends(sender, receiver, caller_sends)):
        send_all(sender, routes, 7)
        assert receiver.wait(7 * len(routes))
    for route in routes:
        got = [(sequence, value) for name, sequence, value in receiver.got if name == route.tensor.name]
        assert [sequence for sequence, _ in got] == list(range(7))
        for sequence, value in got:
            expected = values(route.tensor, sequence)
            assert value.shape == route.tensor.shape
            assert value.dtype == expected.dtype
            assert value.tobytes() == expected.tobytes()


@every_transport
@caller_sends
@pytest.mark.parametrize("codec", [*CODECS])
def test_streams_are_coded_and_memory_is_not(transport: str, caller_sends: bool, codec: str) -> None:
    """Lossy codecs change values slightly, and only over a network; the statistics have the encoded sizes."""
    shapes = [(1, 8, 5, 5), (300, 2000), (0, 4), (), (4, 3)]
    specs = [TensorSpec(f"t{index}", shape, "float32") for index, shape in enumerate(shapes)]
    specs.append(TensorSpec("numbers", (1 << 19,), "int64"))
    routes = [Route(index, spec, "a", "b", 3, codec=fitting(codec, spec)) for index, spec in enumerate(specs)]
    sender, receiver = Sender(routes), Receiver(routes)
    with joined(transport, *ends(sender, receiver, caller_sends)):
        for sequence in range(5):
            for spec in specs:
                assert sender.put(spec.name, sequence, activation(spec, sequence))
        assert receiver.wait(5 * len(specs))
        eventually(lambda: receiver.sizes == sender.sizes, "both ends know the same sizes")
    for name, sequence, value in receiver.got:
        route = next(route for route in routes if route.tensor.name == name)
        expected = activation(route.tensor, sequence)
        if CODECS[route.codec].is_lossy and transport_named(transport).uses_codecs:
            assert value.size < 100 or not np.array_equal(value, expected)
            assert np.allclose(value, expected, rtol=2**-8, atol=4 / 127)
            assert receiver.sizes[name] == {CODECS[route.codec](route.tensor).encoded_bytes}
        else:
            assert value.tobytes() == expected.tobytes()
            if value.nbytes > 100_000:
                coded = transport_named(transport).uses_codecs and route.codec != NONE
                assert (max(receiver.sizes[name]) < value.nbytes) == coded


@functools.lru_cache(maxsize=64)
def activation(spec: TensorSpec, sequence: int) -> np.ndarray:
    """Return a tensor that is half zeros, as after a ReLU; the rest is within 4."""
    drawn = np.random.default_rng(sequence).standard_normal(spec.shape).clip(0, 4)
    return np.asarray(drawn, np.dtype(spec.dtype))


@every_transport
@caller_sends
def test_no_more_is_under_way_than_there_are_credits(transport: str, caller_sends: bool) -> None:
    slow, fast = routes = routes_of(((20 << 20,), "uint8"), ((8,), "uint8"), depth=2)
    sender, receiver = Sender(routes), Receiver(routes, holds=True)
    with joined(transport, *ends(sender, receiver, caller_sends)):
        send_all(sender, [slow], 2 + OUTBOX)
        assert receiver.wait(2)
        assert not sender.put(slow.tensor.name, 9, values(slow.tensor, 9), 0.3)
        assert sender.put(fast.tensor.name, 0, values(fast.tensor, 0))  # no other tensor blocks it
        assert receiver.wait(3)
        receiver.release()
        assert receiver.wait(5)


def test_ends_that_say_nothing_stay_open() -> None:
    """Both ends send heartbeats for longer than an end may be silent; by all transports at once."""
    routes, silent = routes_of(((8,), "uint8")), []
    timeouts = LinkTimeouts(beat_seconds=0.2, silence_seconds=2.0)
    with contextlib.ExitStack() as stack:
        for transport, caller_sends in itertools.product(NAMES, (True, False)):
            sender, receiver = Sender(routes, timeouts), Receiver(routes, timeouts)
            link = stack.enter_context(joined(transport, *ends(sender, receiver, caller_sends)))
            silent.append((transport, sender, receiver, *link))
        time.sleep(timeouts.silence_seconds + 2 * timeouts.beat_seconds)
        for transport, sender, receiver, answering, calling in silent:
            assert not answering.ended.is_set(), transport
            assert not calling.ended.is_set(), transport
            send_all(sender, routes, 1)
            assert receiver.wait(1)


@every_transport
@caller_sends
@pytest.mark.parametrize("who", ["answering", "calling"])
def test_closing_at_any_moment_ends_both_and_leaves_nothing(transport: str, caller_sends: bool, who: str) -> None:
    files = open_files()
    for moment in (0.0, 0.001, 0.003, 0.01, 0.03):
        routes = routes_of(((300_000,), "uint8"), ((8,), "uint8"))
        sender, receiver = Sender(routes), Receiver(routes)
        with joined(transport, *ends(sender, receiver, caller_sends)) as (answering, calling):
            feeding = threading.Thread(target=feed, args=(sender, routes))
            feeding.start()
            receiver.wait(1 if moment else 0)
            threading.Event().wait(moment)
            if who == "answering":
                answering._link.close()
                assert calling.ended.wait(PATIENCE_SECONDS)
                assert isinstance(calling.ends[0], WorkerUnavailableError)
            else:
                calling.close()
                assert answering.ended.wait(PATIENCE_SECONDS)
                assert isinstance(answering.ends[0], WorkerUnavailableError)
        sender.link.close()
        feeding.join(PATIENCE_SECONDS)
    eventually(lambda: not link_threads(), "no thread of a link is left")
    eventually(lambda: open_files() <= files, "no file is left open")


def feed(sender: Sender, routes: Sequence[Route]) -> None:
    for sequence in range(10_000):
        for route in routes:
            while not sender.put(route.tensor.name, sequence, values(route.tensor, 0), 0.02):
                if sender.link.closed:
                    return


class Peer:
    """The calling end in another process, which sends or receives continuously."""

    def __init__(self, answering: Answering, transport: str, role: str, size_bytes: int) -> None:
        words = (answering.endpoint.address, transport, role, str(size_bytes))
        self._process: subprocess.Popen[str] | None = None
        if transport == "mpi":
            self._process_id = mpi_ranks.start_peer(*words)
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.rpc_runtime.link_peer", *words],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": str(FOLDER)},
        )  # fmt: skip
        self._process_id = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process_id, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture(params=["send", "receive"])
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def shared_memory_count() -> int:
    """Return how many mappings of transports' memory this process has, after freeing what nobody refers to."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("tvm-split")


@every_transport
def test_a_peer_that_is_killed_is_noticed_at_once_and_leaves_nothing(transport: str, role: str) -> None:
    route, moments = one_route(100_000), random.Random(7)
    files, memory = open_files(), shared_memory_count()
    for _ in range(2):
        sender, receiver = Sender([route]), Receiver([route])
        answers = receiver.link if role == "send" else sender.link
        with (
            closing(Answering(answers, transport)) as answering,
            closing(Peer(answering, transport, role, 100_000)) as peer,
        ):
            if role == "receive":
                feeding = threading.Thread(target=feed, args=(sender, [route]))
                feeding.start()
            threading.Event().wait(moments.uniform(0, 0.1))
            peer.signal(signal.SIGKILL)
            assert answering.ended.wait(PATIENCE_SECONDS)
            assert isinstance(answering.ends[0], WorkerUnavailableError), answering.ends
            if role == "receive":
                feeding.join(PATIENCE_SECONDS)
        for _, sequence, value in receiver.got:
            assert (value == sequence % 251).all()
    eventually(lambda: open_files() <= files, "no file is left open")
    eventually(lambda: shared_memory_count() <= memory, "no shared memory is left")


@every_transport
def test_a_peer_that_stands_still_is_given_up(transport: str, role: str) -> None:
    route = one_route(1000)
    sender, receiver = Sender([route], SHORT), Receiver([route], SHORT)
    answers = receiver.link if role == "send" else sender.link
    with closing(Answering(answers, transport)) as answering, closing(Peer(answering, transport, role, 1000)) as peer:
        if role == "receive":
            threading.Thread(target=feed, args=(sender, [route]), daemon=True).start()
            eventually(lambda: sender.sent > 3, "some tensors are sent")
        else:
            assert receiver.wait(1)
        peer.signal(signal.SIGSTOP)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert "nothing" in str(answering.ends[0])
        assert "for 1 seconds" in str(answering.ends[0])


NONSENSE = {
    "garbage": [b"garbage"],
    "another tensor": list(tensor_frames(99, 0, np.zeros(8, np.uint8))),
    "another number": list(tensor_frames(0, 5, np.zeros(8, np.uint8))),
    "another size": list(tensor_frames(0, 0, np.zeros(9, np.uint8))),
    "a credit": [control_frame(FrameKind.CREDIT)],
    "a second choice": [control_frame(FrameKind.CHOICE)],
}


@every_transport
@pytest.mark.parametrize("frames", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_the_link_and_both_are_told_why(transport: str, frames: list[bytes]) -> None:
    routes = routes_of(((8,), "uint8"))
    sender, receiver = Sender(routes), Receiver(routes)
    with joined(transport, receiver.link, sender.link) as (answering, calling):
        for frame in frames:
            sender.link.send_now(frame)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert isinstance(answering.ends[0], ProtocolError)
        assert calling.ended.wait(PATIENCE_SECONDS)
        assert isinstance(calling.ends[0], ProtocolError)
        assert str(answering.ends[0]) in str(calling.ends[0])


@pytest.mark.parametrize("transport", [name for name in NAMES if name != "shm"])
def test_a_frame_that_is_too_long_ends_the_link(transport: str) -> None:
    """Shared memory is not included: its headers go over a socket that is full."""
    routes = routes_of(((8,), "uint8"))
    sender, receiver = Sender(routes), Receiver(routes)
    with joined(transport, receiver.link, sender.link) as (answering, calling):
        sender.link.send_now(bytes(3 << 20))
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert isinstance(answering.ends[0], ProtocolError)
        assert calling.ended.wait(PATIENCE_SECONDS)


@every_transport
def test_memory_that_comes_free_out_of_order_is_not_written_too_early(transport: str) -> None:
    """As if two stages read a tensor, one of them not for every micro-batch."""
    (route,) = routes = routes_of(((1000,), "uint8"), depth=3)
    sender, receiver = Sender(routes), Receiver(routes, holds=True)
    with joined(transport, receiver.link, sender.link):
        feeding = threading.Thread(target=send_all, args=(sender, routes, 12))
        feeding.start()
        assert receiver.wait(3)
        oldest = receiver.views[0].copy()
        for count in range(4, 10):
            with receiver.lock:
                receiver.held.pop()()
            receiver.link.flush()
            assert receiver.wait(count)
            assert (receiver.views[0] == oldest).all()
        receiver.release()
        for count in range(10, 13):
            assert receiver.wait(count)
            receiver.release()
        feeding.join(PATIENCE_SECONDS)
    assert [sequence for _, sequence, _ in receiver.got] == list(range(12))
    assert all((value == values(route.tensor, sequence)).all() for _, sequence, value in receiver.got)
