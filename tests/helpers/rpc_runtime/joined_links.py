"""Two ends of a link in this process, joined by a real transport: a gRPC server on loopback, and a caller."""

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from rpc_runtime.client.result_queue import array_slot
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.links import IncomingLink, OutgoingLink
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.transports.opening import LinkAnswer, LinkCall
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import DATA_SERVICE, HELLO_KEY, LINK_METHOD, SERVER_OPTIONS, WorkerEndpoint
from rpc_runtime.wire.messages import hello_of
from tests.helpers.rpc_runtime.mpi_ranks import through_relay
from tests.helpers.waiting import PATIENCE_SECONDS

DEPLOYMENT = "0" * 32
SHORT = LinkTimeouts.of_silence(1.0)
"""Short timeouts for tests that wait until an end counts as silent."""


class Idle:
    """A owner that ignores received tensors, and where nothing waits for room."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.device: Any = None
        self.starving = False

    def moved(self) -> None: ...

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size: int, more: int
    ) -> None: ...

    def widened(self, route: Route, sequence: int, depth: int) -> None: ...

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None: ...

    def room_locked(self) -> None: ...

    def wake(self) -> None: ...

    def starves_locked(self, route: Route, sequence: int) -> bool:
        return self.starving


class Sender(Idle):
    """Sends tensors as soon as there is room."""

    def __init__(self, routes: Sequence[Route], timeouts: LinkTimeouts = USUAL_TIMEOUTS) -> None:
        super().__init__()
        self._room = threading.Condition(self.lock)
        self.link = OutgoingLink(self, routes, flat_bytes, array_slot, timeouts=timeouts)
        self.sent = 0
        self.sizes: dict[str, set[int]] = defaultdict(set)

    def room_locked(self) -> None:
        self._room.notify_all()

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int, under_way: int
    ) -> None:
        self.sent += 1
        self.sizes[route.tensor.name].add(size_bytes)

    def put(self, name: str, sequence: int, value: Any, seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait for room; return whether there was room in time."""
        with self._room:
            if not self._room.wait_for(lambda: self.link.has_room_locked(name), seconds):
                return False
            self.link.put_locked(name, sequence, value)
        self.link.flush()
        return True


class Receiver(Idle):
    """Keeps received tensors, and releases them at once unless it ``holds`` them."""

    def __init__(
        self,
        routes: Sequence[Route],
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
        *,
        reuse: bool = True,
        holds: bool = False,
    ) -> None:
        super().__init__()
        self.come = threading.Condition(self.lock)
        self.link = IncomingLink(self, routes, array_slot, timeouts=timeouts, reuse=reuse)
        self.got: list[tuple[str, int, Any]] = []
        self.sizes: dict[str, set[int]] = defaultdict(set)
        self._holds = holds
        self.held: list[Callable[[], None]] = []
        self.views: list[Any] = []

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int, under_way: int
    ) -> None:
        self.sizes[route.tensor.name].add(size_bytes)

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        with self.lock:
            self.got.append((route.tensor.name, sequence, value.copy()))
            if self._holds:
                self.views.append(value)
                self.held.append(release)
            else:
                release()
            self.come.notify_all()
        self.link.flush()

    def release(self) -> None:
        with self.lock:
            for release in self.held:
                release()
            self.held.clear()
        self.link.flush()

    def wait(self, count: int, seconds: float = PATIENCE_SECONDS) -> bool:
        with self.come:
            return self.come.wait_for(lambda: len(self.got) >= count, seconds)


ANSWERS, CALLS = "0000:02:00.0", "0000:01:00.0"
"""The PCI bus ids of the GPUs of the answering and the calling end of a link over NCCL."""


def _on_a_gpu(link: LinkEnd, transport: str, bus: str) -> None:
    """Give an end of a link over NCCL a GPU, unless it has one."""
    if transport == "nccl" and link.owner.device is None:
        from tests.helpers.rpc_runtime.nccl_ends import ArrayDevice  # needs TVM

        link.owner.device = ArrayDevice(bus)


class Answering:
    """A server that answers data streams one after another with ``link``, and records how they end."""

    def __init__(self, link: LinkEnd, transport: str = "") -> None:
        _on_a_gpu(link, transport, ANSWERS)
        self.ends: list[Exception] = []
        self.ended = threading.Event()
        self._link = link
        handler = grpc.stream_stream_rpc_method_handler(self._answer, None, None)
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(
            self._pool,
            handlers=(grpc.method_handlers_generic_handler(DATA_SERVICE, {LINK_METHOD: handler}),),
            options=SERVER_OPTIONS,
        )
        self.endpoint = WorkerEndpoint("answering", f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}")
        self._server.start()

    def _answer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        hello = pb.Hello.FromString(dict(context.invocation_metadata())[HELLO_KEY])
        yield from LinkAnswer(self._link, hello, "the caller", self._end).frames(requests)

    def _end(self, error: Exception) -> None:
        self.ends.append(error)
        self._link.close()
        self.ended.set()

    def close(self) -> None:
        self._link.close()
        self._server.stop(0).wait(PATIENCE_SECONDS)
        self._pool.shutdown()


class Calling:
    """The calling end of one link."""

    def __init__(self, endpoint: WorkerEndpoint, link: LinkEnd, transport: str) -> None:
        self.ends: list[TvmSplitError] = []
        self.ended = threading.Event()
        _on_a_gpu(link, transport, CALLS)
        endpoint = WorkerEndpoint(endpoint.machine, endpoint.address, transport=transport)
        self.call = LinkCall(endpoint, None, hello_of(DEPLOYMENT, "a", "b"), link, self._end)
        self._link = link
        self.call.wait_accepted(PATIENCE_SECONDS)

    def _end(self, machine: str, error: TvmSplitError) -> None:
        self.ends.append(error)
        self.ended.set()

    def close(self) -> None:
        self._link.close()
        self.call.close()


@contextlib.contextmanager
def joined(transport: str, answers: LinkEnd, calls: LinkEnd) -> Iterator[tuple[Answering, Calling]]:
    """Open a link between its two ends, by a transport."""
    with (
        through_relay() if transport == "mpi" else contextlib.nullcontext(),
        contextlib.closing(Answering(answers, transport)) as answering,
        contextlib.closing(Calling(answering.endpoint, calls, transport)) as calling,
    ):
        assert calling.call.statistics.transport == transport
        yield answering, calling


@functools.lru_cache(maxsize=256)
def values(spec: TensorSpec, sequence: int) -> np.ndarray:
    """Return the values of a micro-batch: different for each micro-batch, and the same in each run."""
    content = np.random.default_rng(sequence).bytes(spec.size_bytes)
    return np.frombuffer(content, np.uint8).view(np.dtype(spec.dtype)).reshape(spec.shape)


def send_all(sender: Sender, routes: Sequence[Route], count: int) -> None:
    for sequence in range(count):
        for route in routes:
            assert sender.put(route.tensor.name, sequence, values(route.tensor, sequence))


def link_threads() -> list[str]:
    """Return the names of this process's threads that belong to links."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("link-", "read-"))]
