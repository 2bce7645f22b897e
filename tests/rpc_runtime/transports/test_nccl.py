"""The two ends of a link by NCCL, without a network: what is refused, what has a deadline, and what passes.

NCCL is the stand-in's, of which each end has a copy: they are of two GPUs, and have a turn each.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.execution.cuda_calls import CudaCalls
from rpc_runtime.execution.cuda_runtime import load_cuda
from rpc_runtime.execution.device_transfers import Uploaded
from rpc_runtime.execution.nccl_calls import LIBRARY, OLDEST, CudaNccl, NcclCommunicator, NcclLibrary
from rpc_runtime.execution.nvcc import installed_folders
from rpc_runtime.program.link_setting import Transport
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.transports import nccl as subject
from rpc_runtime.transports.link_answer import LinkAnswer
from rpc_runtime.transports.link_call import LinkCall
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.nccl import NcclTransfers, nccl_transfers
from rpc_runtime.transports.nccl_device import UNIQUE_ID_BYTES
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.framing import FrameKind, control_frame, decode, shared_tensor_frame
from rpc_runtime.wire.messages import hello_of
from tests.helpers.rpc_runtime.cuda_stand_in import compiled_nccl, on_device
from tests.helpers.rpc_runtime.joined_links import Receiver, Sender
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.waiting import eventually

SIZE = 300_000
ROUTE = one_route(SIZE)
"""With three places."""
READY = decode(control_frame(FrameKind.READY))
OTHER = pb.NcclEnd(version=22703, gpu="another", unique_id=bytes(128))

OnBus = Callable[[str], CudaNccl]


@pytest.fixture(scope="module")
def library(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_nccl(stand_in, tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def device(stand_in: Path) -> ctypes.CDLL:
    """That on which NCCL's stand-in is."""
    return ctypes.CDLL(str(stand_in))


@pytest.fixture
def on_bus(device: ctypes.CDLL, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnBus:
    """NCCL with a GPU at this place of the bus; it is for what is made next, too."""

    def make(bus: str) -> CudaNccl:
        monkeypatch.setenv("STAND_IN_BUS", bus)
        copy = ctypes.CDLL(shutil.copy(library, tmp_path / f"{bus}.so"))
        return CudaNccl(NcclLibrary(copy), CudaCalls(device), on_device(device))

    return make


@pytest.fixture
def closing() -> Iterator[list[NcclTransfers]]:
    """Those in it are closed in the end, which leaves no thread."""
    opened: list[NcclTransfers] = []
    yield opened
    for each in opened:
        each.close()
    left = lambda: [each.name for each in threading.enumerate() if each.name.startswith("nccl")]  # noqa: E731
    eventually(lambda: not left(), "no thread of NCCL is left")


class OnGpu(Receiver):
    """Keeps what comes to it."""

    def __init__(self) -> None:
        super().__init__([ROUTE], reuse=True)

    def deliver(self, route: Route, sequence: int, value: Uploaded, release: Callable[[], None]) -> None:
        super().deliver(route, sequence, np.from_dlpack(value.tensor), release)


def failing(error: TvmSplitError) -> None:
    raise AssertionError(error)


def both_ends(
    first: str, second: str, on_bus: OnBus, closing: list[NcclTransfers], on_end: Callable[[TvmSplitError], None]
) -> tuple[OnGpu, NcclTransfers, Sender, NcclTransfers]:
    """A receiver on the first GPU, which is called, and a sender on the second."""
    receiver, sender = OnGpu(), Sender([ROUTE])
    called_nccl = on_bus(first)
    called = nccl_transfers(receiver.link, called_nccl, pb.NcclEnd(version=22703, gpu="another"), on_end, calls=False)
    closing.append(called)
    calling = nccl_transfers(sender.link, on_bus(second), called.own, on_end, calls=True)
    closing.append(calling)
    called._is_first = called_nccl.gpu < calling.own.gpu
    for each in (called, calling):
        assert each.join(lambda: True)
        each.begin()
    return receiver, called, sender, calling


def pump(link: LinkEnd, other: NcclTransfers) -> None:
    """Brings what one end says to the other one, as a stream does."""

    def run() -> None:
        for frame in link.frames():
            other.receive(decode(frame))

    threading.Thread(target=run, name="nccl-stream", daemon=True).start()


@pytest.mark.parametrize(("first", "second"), [("0000:01:00.0", "0000:02:00.0"), ("0000:02:00.0", "0000:01:00.0")])
def test_what_is_sent_comes_whichever_gpu_is_first(
    first: str, second: str, on_bus: OnBus, closing: list[NcclTransfers], device: ctypes.CDLL
) -> None:
    receiver, called, sender, calling = both_ends(first, second, on_bus, closing, failing)
    pump(sender.link, called)
    pump(receiver.link, calling)
    make, expected = on_device(device), []
    for sequence in range(20):
        value = make(TensorSpec("x", (SIZE,), "uint8"))
        expected.append(np.random.default_rng(sequence).integers(0, 255, SIZE, np.uint8))
        np.from_dlpack(value)[:] = expected[-1]
        assert sender.put("x", sequence, value)
    assert receiver.wait(20)
    assert all(np.array_equal(got, each) for (_, _, got), each in zip(receiver.got, expected, strict=True))
    assert receiver.sizes["x"] == {SIZE}
    for link in (sender.link, receiver.link):
        link.close()


@pytest.mark.parametrize("size", [0, 127, 129])
def test_a_unique_id_of_another_size_is_none(size: int, on_bus: OnBus) -> None:
    other = pb.NcclEnd(version=22703, gpu="another", unique_id=bytes(size))
    with pytest.raises(ProtocolError, match=f"has 128 bytes, got {size}"):
        nccl_transfers(Sender([ROUTE]).link, on_bus("0000:01:00.0"), other, failing, calls=True)


def test_an_id_that_is_nobodys_is_told(on_bus: OnBus) -> None:
    with pytest.raises(WorkerError, match="NCCL fails: ncclCommInitRankConfig"):
        nccl_transfers(Sender([ROUTE]).link, on_bus("0000:01:00.0"), OTHER, failing, calls=True)


def test_who_does_not_come_is_waited_for_no_longer_than_is_said(
    on_bus: OnBus, closing: list[NcclTransfers], device: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "JOIN_SECONDS", 0.2)
    gc.collect()
    before = device.standInAreas()
    alone = nccl_transfers(OnGpu().link, on_bus("0000:01:00.0"), OTHER, failing, calls=False)
    assert device.standInAreas() == before + 3
    closing.append(alone)
    assert not alone.join(lambda: False)
    with pytest.raises(WorkerUnavailableError, match="for the other end to join"):
        alone.join(lambda: True)
    with pytest.raises(WorkerUnavailableError, match="to join"):
        alone.begin()
    alone.close()
    alone.close()
    with pytest.raises(WorkerUnavailableError, match="the link was closed"):
        alone.join(lambda: True)
    gc.collect()
    assert device.standInAreas() == before


def test_what_may_not_be_said_ends_the_link(on_bus: OnBus, closing: list[NcclTransfers]) -> None:
    _, called, _, calling = both_ends("0000:01:00.0", "0000:02:00.0", on_bus, closing, lambda error: None)
    with pytest.raises(ProtocolError, match="of which it was not told"):
        calling.receive(READY)
    with pytest.raises(ProtocolError, match="READY"):
        called.receive(READY)
    announced = [decode(shared_tensor_frame(0, sequence, sequence, SIZE)) for sequence in range(10)]
    with pytest.raises(ProtocolError, match="more tensors were announced"):
        deque(map(called.receive, announced))


def test_a_transfer_that_does_not_end_is_ended_and_leaves_the_gpu(
    on_bus: OnBus, closing: list[NcclTransfers], device: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver is told of it, and does nothing."""
    monkeypatch.setattr(subject, "TURN_SECONDS", 0.2)
    monkeypatch.setattr(subject, "SLOWEST_BYTES_PER_SECOND", 1e9)
    _, _, sender, calling = both_ends("0000:02:00.0", "0000:01:00.0", on_bus, closing, lambda error: None)
    value = on_device(device)(TensorSpec("x", (SIZE,), "uint8"))
    assert sender.put("x", 0, value)
    with pytest.raises(WorkerUnavailableError, match=f"has waited 0 seconds for {SIZE} bytes to pass"):
        list(sender.link.frames())
    turn = calling._nccl.turn
    assert not turn.acquire(blocking=False)
    calling.close()
    assert turn.acquire(blocking=False)


def test_a_turn_of_others_is_waited_for_and_left_to_them(
    on_bus: OnBus, closing: list[NcclTransfers], device: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "TURN_SECONDS", 0.2)
    _, _, sender, calling = both_ends("0000:02:00.0", "0000:01:00.0", on_bus, closing, failing)
    assert calling._nccl.turn.acquire(blocking=False)
    assert sender.put("x", 0, on_device(device)(TensorSpec("x", (SIZE,), "uint8")))
    with pytest.raises(WorkerUnavailableError, match="for other transfers of its GPU"):
        list(sender.link.frames())
    calling.close()
    assert calling._nccl.turn.locked()


def test_a_tensor_without_elements_is_only_told_of(on_bus: OnBus, closing: list[NcclTransfers]) -> None:
    empty = one_route(0)
    alone = nccl_transfers(Sender([empty]).link, on_bus("0000:01:00.0"), OTHER, failing, calls=False)
    closing.append(alone)
    assert list(alone._slots[0, 0].send(None, b"header")) == [b"header"]


def test_who_has_no_gpu_says_so() -> None:
    greeting = hello_of("0" * 32, "a", "b")
    with pytest.raises(WorkerError, match=r"'a' is to send to machine 'c' by NCCL.*its stages are on no GPU"):
        LinkCall(
            WorkerEndpoint("c", "127.0.0.1:1", transport=Transport.NCCL), None, greeting, Sender([ROUTE]).link, print
        )
    greeting.nccl.CopyFrom(OTHER)
    with pytest.raises(WorkerError, match="its stages are on no GPU"):
        LinkAnswer(Receiver([ROUTE]).link, greeting, "the caller", print)


def test_who_was_not_offered_it_cannot_choose_it() -> None:
    choice = control_frame(FrameKind.CHOICE, pb.Choice(nccl=True).SerializeToString())
    answer = LinkAnswer(Receiver([ROUTE]).link, pb.Hello(), "the caller", lambda error: None)
    with pytest.raises(ProtocolError, match="MPI or NCCL chooses it where it is offered"):
        list(answer.frames(iter([choice])))


def test_a_library_without_its_functions_is_too_old(stand_in: Path) -> None:
    with pytest.raises(WorkerError, match=r"is too old, NCCL 2\.18\.0 is needed"):
        NcclLibrary(ctypes.CDLL(str(stand_in)))


def test_a_gpu_without_memory_for_the_places_is_told(device: ctypes.CDLL, on_bus: OnBus) -> None:
    def none(spec: TensorSpec) -> Any:
        raise MemoryError("cudaMalloc: out of memory")

    nccl = on_bus("0000:01:00.0")
    without = CudaNccl(nccl._library, CudaCalls(device), none)
    with pytest.raises(WorkerError, match="no memory for tensor 'x': cudaMalloc: out of memory"):
        nccl_transfers(OnGpu().link, without, OTHER, failing, calls=False)


def test_the_functions_are_those_of_nccls_header(stand_in: Path, tmp_path: Path) -> None:
    """The stand-in has them as `nccl_calls` does, and the compiler compares it with the header."""
    found = [folder / "include" for folder in (*installed_folders("nccl"), *installed_folders())]
    if not all(any((folder / name).is_file() for folder in found) for name in ("nccl.h", "cuda_runtime.h")):
        pytest.skip("NCCL's header and CUDA's are not here")
    compiled_nccl(stand_in, tmp_path, "-DWITH_HEADER", *(f"-I{folder}" for folder in found))


def test_nccls_own_library_is_asked_in_its_words(device: ctypes.CDLL) -> None:
    """pip's, where it is; it says that there is no driver."""
    found = [folder / "lib" / LIBRARY for folder in installed_folders("nccl")]
    if not found or load_cuda() == "":
        pytest.skip("NCCL is not here, or a GPU is")
    real = NcclLibrary(ctypes.CDLL(str(found[0])))
    assert real.version >= OLDEST
    unique_id = real.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    assert unique_id != real.unique_id()
    with pytest.raises(WorkerError, match=r"NCCL fails: ncclCommInitRankConfig: unhandled cuda error.*driver"):
        NcclCommunicator(real, CudaCalls(device), unique_id, 0)
