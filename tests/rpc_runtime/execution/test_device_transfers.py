"""Transfers of a machine with a GPU, tested without one: a stand-in for CUDA's runtime has streams and events.

It copies late, in two halves and in separate threads. So memory that is used or reused too early shows in the values.
"""

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings, strategies as st

from rpc_runtime.errors import StageError, WorkerError
from rpc_runtime.execution.blob_store import read_blob
from rpc_runtime.execution.cuda_calls import CudaCalls, bus_speed
from rpc_runtime.execution.cuda_code import find_nvcc
from rpc_runtime.execution.cuda_runtime import runtime_library
from rpc_runtime.execution.device_transfers import DeviceTransfers, UploadingOwner
from rpc_runtime.execution.executor import StageExecutor
from rpc_runtime.execution.loaded_stage import LoadedStage, WeightCache
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, Bytes, StageSpec, TensorSpec
from tests.helpers.gpu_driver import require_toolkit
from tests.helpers.rpc_runtime.cuda_stand_in import Launched, compiled, on_host
from tests.helpers.rpc_runtime.joined_executors import Ends, check
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.random_programs import BLOB, programs, tensor


def check_on_devices(program: Program, count: int, cuda: ctypes.CDLL) -> None:
    """Check as `check` does, with stages and links of a device on every machine."""
    calls = CudaCalls(cuda)
    transfers: dict[str, DeviceTransfers] = {}

    def of(machine: str) -> DeviceTransfers:
        return transfers.setdefault(machine, DeviceTransfers(calls, on_host))

    def stage(spec: StageSpec) -> Any:
        return Launched(spec, cuda, of(spec.machine))

    def ends(executor: StageExecutor) -> Ends:
        device_transfers = of(executor._program.machine)
        return Ends(UploadingOwner(executor, device_transfers), device_transfers.bytes_of, device_transfers.slot)

    try:
        check(program, count, stage, ends)
    finally:
        for transfer in transfers.values():
            transfer.close()


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(most_replicas=2), count=st.sampled_from([1, 12]))
def test_any_program_on_devices(program: Program, count: int, cuda: ctypes.CDLL) -> None:
    cuda.standInSlow(300)
    check_on_devices(program, count, cuda)


def one_machine() -> Program:
    x, y = tensor("x"), tensor("y")
    return Program((x,), (y,), (StageSpec(0, "s0", "A", (), "cpu", BLOB, (), (x,), (y,)),))


def test_three_micro_batches_are_under_way_at_once(cuda: ctypes.CDLL) -> None:
    """Upload of the third, kernel of the second and download of the first wait until all three have begun."""
    cuda.standInMeet()
    check_on_devices(one_machine(), 6, cuda)
    assert cuda.standInBusy() == 3


def test_what_fails_on_the_device_ends_the_stage_with_cudas_words(cuda: ctypes.CDLL, tmp_path: Path) -> None:
    transfers = DeviceTransfers(CudaCalls(cuda), on_host)
    executable, x = identity(tmp_path, transfers.end)
    cuda.standInFail(700)
    with pytest.raises(StageError, match=r"stage 's'.*cudaEventSynchronize: an illegal memory access was encountered"):
        executable.run([x])


def test_what_is_closed_lets_go_of_all_uploads_when_the_device_fails(cuda: ctypes.CDLL) -> None:
    cuda.standInSlow(30_000)
    transfers = DeviceTransfers(CudaCalls(cuda), on_host)
    spec = TensorSpec("x", (64,), "int32")
    values = [np.frombuffer(mmap(-1, spec.size_bytes), np.int32) for _ in range(4)]  # aligned memory is not copied
    for n, value in enumerate(values):
        value[:] = n
    uploaded = [transfers.upload(spec, tvm.runtime.from_dlpack(value)) for value in values]
    held = [weakref.ref(value) for value in values]
    del values, value
    cuda.standInFail(700)
    with pytest.raises(WorkerError, match="cudaEventSynchronize: an illegal memory access was encountered"):
        transfers.close()
    assert [np.from_dlpack(upload.tensor).tolist() for upload in uploaded if upload] == [[n] * 64 for n in range(4)]
    gc.collect()
    assert [reference() for reference in held] == [None] * 4
    transfers.close()


def identity(folder: Path, finish: Callable[[], None]) -> tuple[LoadedStage, Any]:
    """A stage that returns memory of its input, and an input."""
    maker = ProgramMaker(folder / "identity")
    x = maker.input("x")
    (stage,) = maker.program([maker.stage("s", "A", [x], lambda v: [v])]).stages

    def read(blob: BlobSpec) -> Bytes:
        return read_blob(maker.blob_path(blob.sha256), blob)

    executable = LoadedStage(stage, read(stage.library), read, WeightCache(), finish=finish)
    return executable, tvm.runtime.tensor(np.ones((2, 8), "float32"))


def test_an_output_that_is_an_inputs_memory_is_copied_before_that_is_reused(tmp_path: Path) -> None:
    ended = []
    executable, x = identity(tmp_path, lambda: ended.append(True))
    (output,) = executable.run([x])
    assert ended == [True]
    x.copyfrom(np.zeros((2, 8), "float32"))
    assert np.from_dlpack(output).min() == 1


def test_the_functions_are_those_of_cudas_header(tmp_path: Path) -> None:
    """The stand-in declares them as `cuda_calls` does, and the compiler compares it with the header."""
    require_toolkit()
    nvcc = find_nvcc()
    assert nvcc is not None
    for place in (nvcc.resolve().parents[1], Path("/usr/local/cuda")):
        if (place / "include/cuda_runtime_api.h").is_file():
            compiled(tmp_path, "-DWITH_HEADER", f"-I{place / 'include'}")
            break
    else:
        pytest.skip("CUDA's header is not here")


def test_cudas_runtime_has_the_functions_and_says_where_there_is_no_gpu() -> None:
    require_toolkit()
    real = runtime_library()
    assert real is not None
    count = ctypes.c_int(0)
    if real["cudaGetDeviceCount"](ctypes.byref(count)) == 0 and count.value:
        CudaCalls(real)
    else:
        with pytest.raises(WorkerError, match=r"the GPU fails: cudaStreamCreateWithFlags: .*CUDA"):
            CudaCalls(real)


def test_a_bus_is_measured_in_its_slower_direction(cuda: ctypes.CDLL) -> None:
    cuda.standInSlow(0)
    calls = CudaCalls(cuda)

    def memory(size_bytes: int) -> tuple[object, int]:
        tensor = tvm.runtime.empty((size_bytes,), "uint8")
        return tensor, tensor.data_ptr()

    assert all(0 < figure < math.inf for figure in bus_speed(calls, memory))
    assert calls.bus_identity() == "0000:3b:00.0"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
