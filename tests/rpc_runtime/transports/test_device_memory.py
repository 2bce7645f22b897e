"""What the ends of a link say to each other of memory on a GPU: what is wrong is refused, and leaves nothing open.

Each end meets the other's words as the test writes them; the GPU is the stand-in's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.rpc_runtime.cuda_stand_in import device_memory
from tests.helpers.rpc_runtime.joined_links import Receiver, Sender
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import wait_for
from tvm_split.rpc_runtime.errors import ProtocolError, WorkerError, WorkerUnavailableError
from tvm_split.rpc_runtime.execution.cuda_calls import CudaCalls
from tvm_split.rpc_runtime.execution.device_exchange import CudaExchange
from tvm_split.rpc_runtime.program.link_setting import LinkSetting, Transport
from tvm_split.rpc_runtime.transports import device_memory as subject
from tvm_split.rpc_runtime.transports.device_memory import DEVICE, HANDLE_BYTES, ONLY_HOST
from tvm_split.rpc_runtime.transports.link_memory import AgreedMemory, OwnMemory, others_memory

ROUTE = one_route(100_000)
"""With three places."""
OTHER = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
found, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
assert cuda.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(int(sys.argv[2]))) == 0
assert cuda.cudaIpcGetMemHandle(handle, found) == 0
print(handle.raw.hex(), flush=True)
if sys.stdin.read():
    cuda.cudaFree(found)
"""


@pytest.fixture
def exchange(cuda: ctypes.CDLL) -> CudaExchange:
    return CudaExchange(CudaCalls(cuda, cuda), device_memory(cuda))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The subject's end of a connection, and the test's."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, other:
        for end in (own, other):
            end.settimeout(10)
        yield own, other


def receiver(exchange: CudaExchange | None) -> Receiver:
    made = Receiver([ROUTE], reuse=True)
    made.link.device = exchange
    return made


def sender(exchange: CudaExchange | None) -> Sender:
    made = Sender([ROUTE])
    made.link.device = exchange
    return made


def answered(ends: tuple[socket.socket, socket.socket], own: OwnMemory, answer: bytes) -> tuple[AgreedMemory, bytes]:
    """What a receiver takes when a sender answers so, and what it had sent."""
    own_end, other = ends
    other.send(answer)
    agreed = own.agreed(own_end)
    message, descriptors, _, _ = socket.recv_fds(other, 10_000, 4)
    for descriptor in descriptors:
        os.close(descriptor)
    assert len(descriptors) == 1 + message.startswith(DEVICE)
    return agreed, message


def offered(ends: tuple[socket.socket, socket.socket], message: bytes, count: int, link: Sender) -> AgreedMemory:
    """What a sender takes when it gets this, with so many descriptors."""
    own_end, other = ends
    host = OwnMemory(receiver(None).link, on_device=False)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb"):
        socket.send_fds(other, [message], [host._descriptor, writing, writing][:count])
    return others_memory(own_end, link.link.routes, link.link.device)


def test_places_are_sent_as_handles_and_kept_until_the_sender_has_let_go(
    cuda: ctypes.CDLL, exchange: CudaExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    own_end, other = ends
    other.send(DEVICE)
    agreed = OwnMemory(receiver(exchange).link, on_device=True).agreed(own_end)
    message, descriptors, _, _ = socket.recv_fds(other, 10_000, 4)
    assert agreed.transport is Transport.CUDA_IPC
    assert len(message) == len(DEVICE) + 3 * HANDLE_BYTES
    del agreed
    gc.collect()
    assert cuda.standInAreas(0) == 3
    for descriptor in descriptors:
        os.close(descriptor)
    assert wait_for(lambda: cuda.standInAreas(0) == 0)
    assert wait_for(lambda: "device-memory" not in [thread.name for thread in threading.enumerate()])


def test_a_sender_that_cannot_open_them_says_why(
    cuda: ctypes.CDLL, exchange: CudaExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    own = OwnMemory(receiver(exchange).link, on_device=True)
    agreed, message = answered(ends, own, ONLY_HOST + b"no peer access\x1b[2J")
    assert message.startswith(DEVICE)
    assert (agreed.transport, agreed.reason) == (Transport.SHARED_MEMORY, "no peer access\\x1b[2J")
    del own
    assert wait_for(lambda: cuda.standInAreas(0) == 0)


@pytest.mark.parametrize("answer", [b"yes", b"devices", b"\0"])
def test_a_sender_that_says_something_else_ends_the_link(
    cuda: ctypes.CDLL, exchange: CudaExchange, ends: tuple[socket.socket, socket.socket], answer: bytes
) -> None:
    own = OwnMemory(receiver(exchange).link, on_device=True)
    with pytest.raises(ProtocolError, match="should say what memory it has"):
        answered(ends, own, answer)
    ends[1].close()  # with what was sent, and nobody has taken
    del own
    gc.collect()
    assert wait_for(lambda: cuda.standInAreas(0) == 0)


def test_a_receiver_without_a_gpu_or_with_too_many_places_says_so(
    exchange: CudaExchange, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, message = answered(ends, OwnMemory(receiver(None).link, on_device=True), b"")
    assert b"its stages are on no GPU" in message
    monkeypatch.setattr(subject, "MOST_PLACES", 2)
    _, message = answered(ends, OwnMemory(receiver(exchange).link, on_device=True), b"")
    assert b"the link has 3 places, and 2 at most" in message


def test_memory_of_a_gpu_that_runs_out_is_told(cuda: ctypes.CDLL, ends: tuple[socket.socket, socket.socket]) -> None:
    made = device_memory(cuda)
    kept = []

    def two(spec: object) -> object:
        if len(kept) == 2:
            raise MemoryError("cudaMalloc: out of memory")
        kept.append(True)
        return made(spec)  # type: ignore[arg-type]

    own = OwnMemory(receiver(CudaExchange(CudaCalls(cuda, cuda), two)).link, on_device=True)
    agreed, message = answered(ends, own, b"")
    assert agreed.transport is Transport.SHARED_MEMORY
    assert b"the GPU has no memory for tensor 'x': cudaMalloc: out of memory" in message
    gc.collect()
    assert cuda.standInAreas(0) == 0


@pytest.mark.parametrize(
    ("message", "descriptors"),
    {
        "none": (ONLY_HOST, 0),
        "two without handles": (ONLY_HOST, 2),
        "handles without a pipe": (DEVICE + bytes(3 * HANDLE_BYTES), 1),
        "three": (DEVICE + bytes(3 * HANDLE_BYTES), 3),
        "too few handles": (DEVICE + bytes(2 * HANDLE_BYTES), 2),
        "too many handles": (DEVICE + bytes(4 * HANDLE_BYTES), 2),
        "very many": (DEVICE + bytes(1000 * HANDLE_BYTES), 2),
        "half a handle": (DEVICE + bytes(3 * HANDLE_BYTES - 1), 2),
        "other words": (b"nothing", 1),
    }.values(),
)
def test_a_receiver_that_sends_something_else_ends_the_link(
    exchange: CudaExchange, ends: tuple[socket.socket, socket.socket], message: bytes, descriptors: int
) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(ProtocolError):
        offered(ends, message, descriptors, sender(exchange))
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_an_end_that_dies_meanwhile_is_gone_and_not_wrong(
    cuda: ctypes.CDLL, exchange: CudaExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    own_end, other = ends
    own = OwnMemory(receiver(exchange).link, on_device=True)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(WorkerUnavailableError, match="its other end went"):
        own.agreed(own_end)
    with pytest.raises(WorkerUnavailableError, match="its other end went"):
        others_memory(own_end, sender(exchange).link.routes, exchange)
    other.close()
    del own
    gc.collect()
    assert wait_for(lambda: cuda.standInAreas(0) == 0)


def test_handles_that_nobody_asked_for_end_the_link(
    exchange: CudaExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    own_end, other = ends
    with Path(os.devnull).open("rb") as nothing:
        socket.send_fds(other, [DEVICE + bytes(3 * HANDLE_BYTES)], [nothing.fileno()] * 2)
    with pytest.raises(ProtocolError, match="no memory that fits"):
        others_memory(own_end, sender(exchange).link.routes, None)


def test_handles_of_nothing_and_of_this_very_process_are_not_opened(
    cuda: ctypes.CDLL, exchange: CudaExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    handle, slot = exchange.own_slot(ROUTE.tensor)
    for handles in (bytes(3 * HANDLE_BYTES), handle * 3):
        agreed = offered(ends, DEVICE + handles, 2, sender(exchange))
        assert agreed.transport is Transport.SHARED_MEMORY
        assert "cudaIpcOpenMemHandle" in agreed.reason
        assert ends[1].recv(1000) == ONLY_HOST + agreed.reason.encode()
    assert (cuda.standInAreas(0), cuda.standInAreas(1)) == (1, 0)
    del slot


@contextlib.contextmanager
def others_process(library: Path, size_bytes: int) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """Another process with memory, and the handle of it. Told so, it frees it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(library), str(size_bytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, bytes.fromhex(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.communicate(timeout=20)


@contextlib.contextmanager
def others_handle(library: Path, size_bytes: int) -> Iterator[bytes]:
    with others_process(library, size_bytes) as (_, handle):
        yield handle


def test_memory_that_is_too_small_ends_the_link(
    stand_in: Path, cuda: ctypes.CDLL, exchange: CudaExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    """A GPU that writes behind its end fails for good."""
    enough, less = 2 << 20, 99_999
    with others_handle(stand_in, enough) as large, others_handle(stand_in, less) as small:
        with pytest.raises(ProtocolError, match="tensor 'x' should have 100000 bytes, it has 99999"):
            offered(ends, DEVICE + large * 2 + small, 2, sender(exchange))
        assert cuda.standInAreas(1) == 0
        agreed = offered(ends, DEVICE + large * 3, 2, sender(exchange))
        assert agreed.transport is Transport.CUDA_IPC
        assert ends[1].recv(1000) == DEVICE
        assert cuda.standInAreas(1) == 1
        del agreed
        gc.collect()
        assert cuda.standInAreas(1) == 0


def test_a_driver_that_does_not_say_how_large_memory_is_leaves_it_to_the_host(
    stand_in: Path, cuda: ctypes.CDLL, ends: tuple[socket.socket, socket.socket]
) -> None:
    without = CudaExchange(CudaCalls(cuda), device_memory(cuda))
    with others_handle(stand_in, 2 << 20) as handle:
        agreed = offered(ends, DEVICE + handle * 3, 2, sender(without))
        assert "no NVIDIA driver to ask" in agreed.reason
        assert cuda.standInAreas(1) == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_the_stand_in_ends_a_process_that_frees_what_another_has_open(
    stand_in: Path, cuda: ctypes.CDLL, is_open: bool
) -> None:
    """Otherwise no test would see it."""
    calls = CudaCalls(cuda, cuda)
    with others_process(stand_in, 4096) as (process, handle):
        address = calls.opened(handle)
        assert calls.opened(handle) == address
        calls.shut(address)
        if not is_open:
            calls.shut(address)
        _, said = process.communicate("free", timeout=20)
        assert process.returncode == (-signal.SIGABRT if is_open else 0)
        assert ("freed that another process has open" in said) == is_open
    if is_open:
        calls.shut(address)


def test_a_link_is_expected_from_gpu_to_gpu_only_where_it_was_asked_for() -> None:
    asked, usual = LinkSetting(transport=Transport.CUDA_IPC), LinkSetting()
    assert asked.expected("host", "host") is Transport.CUDA_IPC
    assert asked.expected("host", "host", have_gpus=False) is Transport.SHARED_MEMORY
    assert asked.expected("host", "other") is Transport.GRPC
    assert asked.expected("", "") is Transport.GRPC
    assert usual.expected("host", "host") is Transport.SHARED_MEMORY
    with pytest.raises(WorkerError, match="on no GPU"):
        subject.require_device(None)
