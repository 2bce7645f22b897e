"""What only NCCL does, besides what `test_transports` shows of every transport: GPUs, their locks, and its library.

NCCL is a stand-in. It copies late and in halves, connects at the first transfer, and reports a dead peer as NCCL does.
It ends a process that has two transfers in flight on one GPU, or that uses an aborted communicator.
"""

import contextlib
import ctypes
import gc
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from rpc_runtime.errors import ProtocolError, WorkerError, WorkerUnavailableError
from rpc_runtime.execution.cuda_calls import CudaCalls
from rpc_runtime.execution.cuda_code import installed_folders
from rpc_runtime.execution.cuda_runtime import load_cuda
from rpc_runtime.transports.nccl import Nccl, NcclEnd
from rpc_runtime.transports.nccl_calls import LIBRARY, OLDEST, UNIQUE_ID_BYTES, NcclCommunicator, NcclLibrary
from rpc_runtime.transports.stream import Stream
from rpc_runtime.transports.transport import Opening, Unusable
from rpc_runtime.wire.framing import FrameKind, control_frame, shared_tensor_frame
from tests.helpers.rpc_runtime.cuda_stand_in import compiled_nccl
from tests.helpers.rpc_runtime.joined_links import ANSWERS, DEPLOYMENT, Receiver, Sender, joined, send_all, values
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.rpc_runtime.nccl_ends import ArrayDevice, device
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

SIZE = 300_000
ROUTE = one_route(SIZE)
"""A route with three slots."""
READY = control_frame(FrameKind.READY)
ANNOUNCED = [shared_tensor_frame(0, sequence, sequence, SIZE) for sequence in range(10)]


@pytest.mark.parametrize(
    ("receiver_says", "frames"),
    [(False, [READY]), (True, [READY]), (False, ANNOUNCED)],
    ids=["ready of its own accord", "ready for nothing", "more than there are slots"],
)
def test_what_may_not_be_said_ends_the_link(receiver_says: bool, frames: list[bytes]) -> None:
    receiver, sender = Receiver([ROUTE]), Sender([ROUTE])
    with joined("nccl", receiver.link, sender.link) as (answering, calling):
        for frame in frames:
            (receiver if receiver_says else sender).link.send_now(frame)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert calling.ended.wait(PATIENCE_SECONDS)
        # The sender did not begin these transfers, so it may be the first to complain, about a receiver that is ready.
        assert any(isinstance(error, ProtocolError) for error in (answering.ends[0], calling.ends[0]))
    nccl_threads = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("nccl")]  # noqa: E731
    eventually(lambda: not nccl_threads(), "no thread of NCCL is left")


def test_three_gpus_that_send_in_a_ring_both_ways_wait_for_each_other_and_not_for_ever() -> None:
    """Each GPU does one transfer at a time, or the stand-in ends this process."""
    buses = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:01:00.0")
    receivers = []
    with contextlib.ExitStack() as links:
        threads = []
        for source, target in (*pairwise(buses), *pairwise(reversed(buses))):
            receiver, sender = Receiver([ROUTE]), Sender([ROUTE])
            receiver.device, sender.device = ArrayDevice(target), ArrayDevice(source)
            links.enter_context(joined("nccl", receiver.link, sender.link))
            receivers.append(receiver)
            threads.append(threading.Thread(target=send_all, args=(sender, [ROUTE], 10)))
        for thread in threads:
            thread.start()
        assert all(receiver.wait(10) for receiver in receivers)
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    for receiver in receivers:
        assert all((value == values(ROUTE.tensor, sequence)).all() for _, sequence, value in receiver.got)


@pytest.mark.parametrize("size", [0, 131])
def test_what_is_no_end_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"at least 132 bytes expected, got {size}"):
        NcclEnd.from_bytes(bytes(size))


def opening() -> Opening:
    receiver = Receiver([ROUTE])
    receiver.device = ArrayDevice(ANSWERS)
    return Opening(receiver.link, DEPLOYMENT, "the caller", Stream(receiver.link, lambda: True))


def test_ends_that_nccl_cannot_join() -> None:
    own = NcclEnd.from_bytes(Nccl().offer(opening()))
    for other, words in (
        (NcclEnd(22800, "another"), "the same NCCL, this one has 2.27.3, the other one 2.28.0"),
        (own, "both ends are on the same GPU"),
    ):
        with pytest.raises(Unusable, match=words):
            Nccl().answer(opening(), other.to_bytes())


def test_an_end_that_does_not_come_is_waited_for_no_longer_than_is_said() -> None:
    gc.collect()
    before, transport = device().standInAreas(), Nccl()
    transport.connect_seconds = 0.2
    _, ready = transport.answer(opening(), NcclEnd(22703, "another").to_bytes())
    with contextlib.closing(ready):
        assert device().standInAreas() == before + 3
        with pytest.raises(WorkerUnavailableError, match="for the other end to join"):
            ready.accept()
    with pytest.raises(WorkerUnavailableError, match="the link was closed"):
        ready.accept()
    del ready
    gc.collect()
    assert device().standInAreas() == before


def test_the_functions_are_those_of_nccls_header(stand_in: Path, tmp_path: Path) -> None:
    """The stand-in declares them as `nccl_calls` does, and the compiler compares it with the header."""
    include_folders = [folder / "include" for folder in (*installed_folders("nccl"), *installed_folders())]
    if not all(any((folder / name).is_file() for folder in include_folders) for name in ("nccl.h", "cuda_runtime.h")):
        pytest.skip("NCCL's header and CUDA's are not here")
    compiled_nccl(stand_in, tmp_path, "-DWITH_HEADER", *(f"-I{folder}" for folder in include_folders))


def test_nccls_own_library_is_asked_in_its_words() -> None:
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
        NcclCommunicator(real, CudaCalls(device()), unique_id, 0)
