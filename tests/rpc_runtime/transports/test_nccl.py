"""The two ends of a link over NCCL, without a network: rejected requests, deadlines, and transfers.

NCCL is a stand-in. Each end has its own copy, because they represent two GPUs with separate locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpc_runtime.errors import ProtocolError, WorkerError, WorkerUnavailableError
from rpc_runtime.execution.cuda_calls import CudaCalls
from rpc_runtime.execution.cuda_code import installed_folders
from rpc_runtime.execution.cuda_runtime import load_cuda
from rpc_runtime.execution.nccl_calls import LIBRARY, OLDEST, CudaNccl, NcclCommunicator, NcclLibrary
from rpc_runtime.transports.grpc import Stream
from rpc_runtime.transports.nccl import UNIQUE_ID_BYTES, Nccl, NcclEnd
from rpc_runtime.transports.transport import Opening
from rpc_runtime.wire.framing import FrameKind, control_frame, shared_tensor_frame
from tests.helpers.rpc_runtime.cuda_stand_in import compiled_nccl, on_device
from tests.helpers.rpc_runtime.joined_links import DEPLOYMENT, Answering, Calling, Receiver, Sender, joined
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

SIZE = 300_000
ROUTE = one_route(SIZE)
"""A route with three slots."""
READY = control_frame(FrameKind.READY)
ANNOUNCED = [shared_tensor_frame(0, sequence, sequence, SIZE) for sequence in range(10)]
OTHER = NcclEnd(22703, "another")

OnBus = Callable[[str], Callable[[], CudaNccl]]


@pytest.fixture(scope="module")
def library(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_nccl(stand_in, tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def device(stand_in: Path) -> ctypes.CDLL:
    """Return the stand-in for CUDA's runtime that NCCL's stand-in uses."""
    return ctypes.CDLL(str(stand_in))


@pytest.fixture
def on_bus(device: ctypes.CDLL, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnBus:
    """Return a function that returns NCCL with a GPU at a bus id, where the next communicators are made."""

    def make(bus: str) -> Callable[[], CudaNccl]:
        monkeypatch.setenv("STAND_IN_BUS", bus)
        copy = ctypes.CDLL(shutil.copy(library, tmp_path / f"{bus}.so"))
        nccl = CudaNccl(NcclLibrary(copy), CudaCalls(device), on_device(device))

        def give() -> CudaNccl:
            monkeypatch.setenv("STAND_IN_BUS", bus)
            return nccl

        return give

    return make


@contextlib.contextmanager
def both_ends(first: str, second: str, on_bus: OnBus) -> Iterator[tuple[Receiver, Sender, Answering, Calling]]:
    """Yield a receiver on the first GPU, which answers, and a sender on the second. No NCCL thread may remain."""
    receiver, sender = Receiver([ROUTE], reuse=True), Sender([ROUTE])
    receiver.link.nccl, sender.link.nccl = on_bus(first), on_bus(second)
    with joined("nccl", receiver.link, sender.link) as opened:
        yield receiver, sender, *opened
    nccl_threads = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("nccl")]  # noqa: E731
    eventually(lambda: not nccl_threads(), "no thread of NCCL is left")


@pytest.mark.parametrize(
    ("receiver_says", "frames"),
    [(False, [READY]), (True, [READY]), (False, ANNOUNCED)],
    ids=["ready of its own accord", "ready for nothing", "more than there are slots"],
)
def test_what_may_not_be_said_ends_the_link(receiver_says: bool, frames: list[bytes], on_bus: OnBus) -> None:
    with both_ends("0000:01:00.0", "0000:02:00.0", on_bus) as (receiver, sender, answering, calling):
        for frame in frames:
            (receiver if receiver_says else sender).link.say(frame)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert calling.ended.wait(PATIENCE_SECONDS)
        # The sender did not begin these transfers, so it may be the first to complain, about a receiver that is ready.
        assert any(isinstance(error, ProtocolError) for error in (answering.ends[0], calling.ends[0]))


@pytest.mark.parametrize("size", [0, 131])
def test_what_is_no_end_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"at least 132 bytes, got {size}"):
        NcclEnd.from_bytes(bytes(size))


def test_an_end_that_does_not_come_is_waited_for_no_longer_than_is_said(on_bus: OnBus, device: ctypes.CDLL) -> None:
    gc.collect()
    before, link = device.standInAreas(), Receiver([ROUTE], reuse=True).link
    link.nccl = on_bus("0000:01:00.0")
    opening = Opening(link, DEPLOYMENT, "the caller", Stream(link, lambda: True))
    transport = Nccl()
    transport.connect_seconds = 0.2
    _, ready = transport.answer(opening, OTHER.to_bytes())
    with contextlib.closing(ready):
        assert device.standInAreas() == before + 3
        with pytest.raises(WorkerUnavailableError, match="for the other end to join"):
            ready.accept()
    with pytest.raises(WorkerUnavailableError, match="the link was closed"):
        ready.accept()
    del ready
    gc.collect()
    assert device.standInAreas() == before


def test_the_functions_are_those_of_nccls_header(stand_in: Path, tmp_path: Path) -> None:
    """The stand-in declares them as `nccl_calls` does, and the compiler compares it with the header."""
    include_folders = [folder / "include" for folder in (*installed_folders("nccl"), *installed_folders())]
    if not all(any((folder / name).is_file() for folder in include_folders) for name in ("nccl.h", "cuda_runtime.h")):
        pytest.skip("NCCL's header and CUDA's are not here")
    compiled_nccl(stand_in, tmp_path, "-DWITH_HEADER", *(f"-I{folder}" for folder in include_folders))


def test_nccls_own_library_is_asked_in_its_words(device: ctypes.CDLL) -> None:
    """Uses pip's NCCL if it is installed; it reports that there is no driver."""
    libraries = [folder / "lib" / LIBRARY for folder in installed_folders("nccl")]
    if not libraries or load_cuda() == "":
        pytest.skip("NCCL is not here, or a GPU is")
    real = NcclLibrary(ctypes.CDLL(str(libraries[0])))
    assert real.version >= OLDEST
    unique_id = real.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    assert unique_id != real.unique_id()
    with pytest.raises(WorkerError, match=r"NCCL fails: ncclCommInitRankConfig: unhandled cuda error.*driver"):
        NcclCommunicator(real, CudaCalls(device), unique_id, 0)
