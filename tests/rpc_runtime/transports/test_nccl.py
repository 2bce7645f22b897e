"""The two ends of a link by NCCL, without a network: what is refused, what has a deadline, and what passes.

NCCL is the stand-in's, of which each end has a copy: they are of two GPUs, and have a turn each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rpc_runtime.errors import ProtocolError, WorkerError, WorkerUnavailableError
from rpc_runtime.execution.cuda_calls import CudaCalls
from rpc_runtime.execution.cuda_runtime import load_cuda
from rpc_runtime.execution.device_transfers import Uploaded
from rpc_runtime.execution.nccl_calls import LIBRARY, OLDEST, CudaNccl, NcclCommunicator, NcclLibrary
from rpc_runtime.execution.nvcc import installed_folders
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.transports.grpc import Stream
from rpc_runtime.transports.nccl import UNIQUE_ID_BYTES, Nccl, NcclEnd, NcclTimeouts
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.transports.transport import Opening, Pending
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.framing import FrameKind, control_frame, shared_tensor_frame
from rpc_runtime.wire.messages import hello_of
from tests.helpers.rpc_runtime.cuda_stand_in import compiled_nccl, on_device
from tests.helpers.rpc_runtime.joined_links import DEPLOYMENT, Answering, Calling, Receiver, Sender, joined
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

SIZE = 300_000
ROUTE = one_route(SIZE)
"""With three places."""
READY = control_frame(FrameKind.READY)
ANNOUNCED = [shared_tensor_frame(0, sequence, sequence, SIZE) for sequence in range(10)]
OTHER = NcclEnd(22703, "another")

OnBus = Callable[[str], Callable[[], CudaNccl]]


@pytest.fixture(scope="module")
def library(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_nccl(stand_in, tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def device(stand_in: Path) -> ctypes.CDLL:
    """That on which NCCL's stand-in is."""
    return ctypes.CDLL(str(stand_in))


@pytest.fixture
def on_bus(device: ctypes.CDLL, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnBus:
    """Gives NCCL with a GPU at this place of the bus, where communicators are that are made next."""

    def make(bus: str) -> Callable[[], CudaNccl]:
        monkeypatch.setenv("STAND_IN_BUS", bus)
        copy = ctypes.CDLL(shutil.copy(library, tmp_path / f"{bus}.so"))
        made = CudaNccl(NcclLibrary(copy), CudaCalls(device), on_device(device))

        def give() -> CudaNccl:
            monkeypatch.setenv("STAND_IN_BUS", bus)
            return made

        return give

    return make


class OnGpu(Receiver):
    """Keeps what comes to it."""

    def __init__(self) -> None:
        super().__init__([ROUTE], reuse=True)

    def deliver(self, route: Route, sequence: int, value: Uploaded, release: Callable[[], None]) -> None:
        super().deliver(route, sequence, np.from_dlpack(value.tensor), release)


@contextlib.contextmanager
def pending(on_bus: OnBus, timeouts: NcclTimeouts) -> Iterator[tuple[Opening, Pending, bytes]]:
    """The called end of a link that nobody has joined yet, and its answer."""
    receiver = OnGpu()
    receiver.link.nccl = on_bus("0000:01:00.0")
    opening = Opening(receiver.link, DEPLOYMENT, "the caller", Stream(receiver.link, lambda: True))
    answer, ready = Nccl(timeouts).answer(opening, OTHER.to_bytes())
    try:
        yield opening, ready, answer
    finally:
        ready.close()


@contextlib.contextmanager
def both_ends(first: str, second: str, on_bus: OnBus) -> Iterator[tuple[OnGpu, Sender, Answering, Calling]]:
    """A receiver on the first GPU, which is called, and a sender on the second. No thread of NCCL is left."""
    receiver, sender = OnGpu(), Sender([ROUTE])
    receiver.link.nccl, sender.link.nccl = on_bus(first), on_bus(second)
    with joined("nccl", receiver.link, sender.link) as opened:
        yield receiver, sender, *opened
    left = lambda: [each.name for each in threading.enumerate() if each.name.startswith("nccl")]  # noqa: E731
    eventually(lambda: not left(), "no thread of NCCL is left")


@pytest.mark.parametrize(("first", "second"), [("0000:01:00.0", "0000:02:00.0"), ("0000:02:00.0", "0000:01:00.0")])
def test_what_is_sent_comes_whichever_gpu_is_first(first: str, second: str, on_bus: OnBus, device: ctypes.CDLL) -> None:
    make, expected = on_device(device), []
    with both_ends(first, second, on_bus) as (receiver, sender, *_):
        for sequence in range(20):
            value = make(TensorSpec("x", (SIZE,), "uint8"))
            expected.append(np.random.default_rng(sequence).integers(0, 255, SIZE, np.uint8))
            np.from_dlpack(value)[:] = expected[-1]
            assert sender.put("x", sequence, value)
        assert receiver.wait(20)
    assert all(np.array_equal(got, each) for (_, _, got), each in zip(receiver.got, expected, strict=True))
    assert receiver.sizes["x"] == {SIZE}


@pytest.mark.parametrize("frames", [[READY], ANNOUNCED], ids=["ready of its own accord", "more than there are slots"])
def test_what_may_not_be_said_ends_the_link(frames: list[bytes], on_bus: OnBus) -> None:
    with both_ends("0000:01:00.0", "0000:02:00.0", on_bus) as (_, sender, answering, calling):
        for frame in frames:
            sender.link.say(frame)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert calling.ended.wait(PATIENCE_SECONDS)
        # The sender did not begin these transfers, so it may be the first to complain, about a receiver that is ready.
        assert any(isinstance(error, ProtocolError) for error in (answering.ends[0], calling.ends[0]))


def test_a_sender_is_not_told_that_an_unannounced_tensor_is_awaited(on_bus: OnBus) -> None:
    with both_ends("0000:01:00.0", "0000:02:00.0", on_bus) as (receiver, _, _, calling):
        receiver.link.say(READY)
        assert calling.ended.wait(PATIENCE_SECONDS)
        assert "of which it was not told" in str(calling.ends[0])


@pytest.mark.parametrize("size", [0, 131])
def test_what_is_no_end_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"at least 132 bytes, got {size}"):
        NcclEnd.from_bytes(bytes(size))


def test_an_end_that_does_not_come_is_waited_for_no_longer_than_is_said(on_bus: OnBus, device: ctypes.CDLL) -> None:
    gc.collect()
    before = device.standInAreas()
    with pending(on_bus, NcclTimeouts(join_seconds=0.2)) as (_, ready, _):
        assert device.standInAreas() == before + 3
        with pytest.raises(WorkerUnavailableError, match="for the other end to join"):
            ready.accept()
        ready.close()
        with pytest.raises(WorkerUnavailableError, match="the link was closed"):
            ready.accept()
    del ready, _
    gc.collect()
    assert device.standInAreas() == before


def test_an_id_that_is_nobodys_is_told(on_bus: OnBus) -> None:
    sender = Sender([ROUTE])
    sender.link.nccl = on_bus("0000:01:00.0")
    opening = Opening(sender.link, DEPLOYMENT, "the worker", Stream(sender.link, lambda: True))
    with pytest.raises(WorkerError, match="NCCL fails: ncclCommInitRankConfig"):
        Nccl().connect(opening, OTHER.to_bytes())


def test_a_process_without_a_gpu_says_so() -> None:
    greeting = hello_of(DEPLOYMENT, "a", "c")
    endpoint = WorkerEndpoint("c", "127.0.0.1:1", transport="nccl")
    with pytest.raises(WorkerError, match=r"from 'a' to 'c' cannot be opened by nccl: its stages are on no GPU"):
        LinkCall(endpoint, None, greeting, Sender([ROUTE]).link, print)


def test_a_library_without_its_functions_is_too_old(stand_in: Path) -> None:
    with pytest.raises(WorkerError, match=r"is too old, NCCL 2\.18\.0 is needed"):
        NcclLibrary(ctypes.CDLL(str(stand_in)))


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
