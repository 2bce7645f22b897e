"""Recording and launching by a stand-in of CUDA's runtime, which forbids what CUDA forbids during a recording."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
import tvm

from tests.helpers.gpu_driver import require_toolkit
from tests.helpers.rpc_runtime.cuda_stand_in import on_host
from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.execution.cuda_calls import CudaCalls, Stream
from tvm_split.rpc_runtime.execution.cuda_graphs import Graph, GraphCalls
from tvm_split.rpc_runtime.execution.cuda_runtime import runtime_library
from tvm_split.rpc_runtime.execution.device_transfers import DeviceTransfers
from tvm_split.rpc_runtime.execution.stage_graph import stage_graphs
from tvm_split.rpc_runtime.execution.switches import CUDA_GRAPHS
from tvm_split.rpc_runtime.program.program import BlobSpec, StageSpec, TensorSpec

Kernel = ctypes.CFUNCTYPE(None)
GLOBAL = 0


@pytest.fixture
def cuda(cuda: ctypes.CDLL) -> ctypes.CDLL:
    cuda.standInLaunchOn.argtypes = (ctypes.c_void_p, Kernel)
    return cuda


class Steps:
    """Two kernels over four numbers, with memory between them that the first one writes."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda
        self.given, self.between, self.made = (np.zeros(4, np.int64) for _ in range(3))
        self._kernels = Kernel(self._double), Kernel(self._add)

    def _double(self) -> None:
        self.between[:] = self.given * 2

    def _add(self) -> None:
        self.made[:] = self.between + 1

    def put(self, stream: Stream) -> None:
        for kernel in self._kernels:
            assert self._cuda.standInLaunchOn(stream.address, kernel) == 0


def test_what_is_recorded_is_done_when_it_is_launched_and_each_time(cuda: ctypes.CDLL) -> None:
    calls, steps = GraphCalls(cuda), Steps(cuda)
    stream = calls.stream()
    graph = calls.record(stream, lambda: steps.put(stream))
    calls.wait(stream)
    assert not steps.made.any()
    source, target = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for number in range(20):
        source[:] = number
        calls.copy(source.ctypes.data, steps.given.ctypes.data, 32)
        calls.launch(graph)
        calls.copy(steps.made.ctypes.data, target.ctypes.data, 32)
        calls.wait()
        assert target.tolist() == [number * 2 + 1] * 4
    assert cuda.standInLaunched() == 20


def test_launches_are_in_the_order_of_the_stream(cuda: ctypes.CDLL) -> None:
    """Three micro-batches under way: none waits for the host in between."""
    calls, steps = GraphCalls(cuda), Steps(cuda)
    stream = calls.stream()
    graph = calls.record(stream, lambda: steps.put(stream))
    sources, targets = np.arange(12).reshape(3, 4), np.zeros((3, 4), np.int64)
    for source, target in zip(sources, targets, strict=True):
        calls.copy(source.ctypes.data, steps.given.ctypes.data, 32)
        calls.launch(graph)
        calls.copy(steps.made.ctypes.data, target.ctypes.data, 32)
    calls.wait()
    assert np.array_equal(targets, sources * 2 + 1)


def test_others_go_on_while_a_thread_records(cuda: ctypes.CDLL) -> None:
    """They lock pages, upload, and launch on TVM's stream; in the global mode that would end the recording."""
    calls, steps = GraphCalls(cuda), Steps(cuda)
    stream = calls.stream()
    spec = TensorSpec("x", (4,), "int64")
    seen: list[list[int]] = []

    def others() -> None:
        transfers = DeviceTransfers(CudaCalls(cuda), on_host)
        uploaded = transfers.upload(spec, tvm.runtime.tensor(np.full(4, 7)))
        transfers.begin([uploaded])
        kernel = Kernel(lambda: seen.append(np.from_dlpack(uploaded.tensor).tolist() if uploaded else []))
        cuda.standInLaunch(kernel)
        transfers.end()
        seen.append(transfers.bytes_of(tvm.runtime.tensor(np.full(4, 8))).view(np.int64).tolist())
        transfers.close()

    def put() -> None:
        thread = threading.Thread(target=others)
        thread.start()
        thread.join(60)
        steps.put(stream)

    graph = calls.record(stream, put)
    assert seen == [[7] * 4, [8] * 4]
    steps.given[:] = 3
    calls.launch(graph)
    calls.wait()
    assert steps.made.tolist() == [7] * 4

    begin, end = cuda["cudaStreamBeginCapture"], cuda["cudaStreamEndCapture"]
    begin.argtypes = (ctypes.c_void_p, ctypes.c_int)
    end.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    recorded, failures = ctypes.c_void_p(), []

    def locks() -> None:
        try:
            CudaCalls(cuda).host_memory(8)
        except WorkerError as error:
            failures.append(str(error))

    assert begin(stream.address, GLOBAL) == 0
    thread = threading.Thread(target=locks)
    thread.start()
    thread.join(60)
    assert end(stream.address, ctypes.byref(recorded)) != 0
    assert failures == ["the GPU fails: cudaMallocHost: operation not permitted when stream is capturing"]


def test_who_records_may_not_allocate(cuda: ctypes.CDLL) -> None:
    """It fails, and leaves nothing behind: the stream records again."""
    calls, steps = GraphCalls(cuda), Steps(cuda)
    host, stream = CudaCalls(cuda), calls.stream()

    def put() -> None:
        steps.put(stream)
        host.host_memory(8)

    with pytest.raises(WorkerError, match="cudaMallocHost: operation not permitted when stream is capturing"):
        calls.record(stream, put)

    def hide() -> None:
        with pytest.raises(WorkerError):
            put()

    with pytest.raises(WorkerError, match="cudaStreamEndCapture: operation failed due to a previous error"):
        calls.record(stream, hide)
    assert cuda.standInGraphs() == 0
    assert cuda["cudaGetLastError"]() == 0
    assert isinstance(calls.record(stream, lambda: steps.put(stream)), Graph)


@pytest.mark.parametrize("call", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_call_that_fails_is_named_and_leaves_no_graph(cuda: ctypes.CDLL, call: str) -> None:
    calls, steps = GraphCalls(cuda), Steps(cuda)
    stream = calls.stream()
    cuda.standInFailIn(call.encode(), 700)
    with pytest.raises(WorkerError, match=f"the GPU fails: {call}: an illegal memory access was encountered"):
        calls.record(stream, lambda: steps.put(stream))
    cuda.standInFailIn(b"", 0)
    assert cuda.standInGraphs() == 0
    steps.given[:] = 1
    steps.put(stream)  # it records no more
    calls.wait(stream)
    assert steps.made.tolist() == [3] * 4


def test_a_launch_that_fails_is_named(cuda: ctypes.CDLL) -> None:
    calls, steps = GraphCalls(cuda), Steps(cuda)
    stream = calls.stream()
    graph = calls.record(stream, lambda: steps.put(stream))
    cuda.standInFailIn(b"cudaGraphLaunch", 700)
    with pytest.raises(WorkerError, match="the GPU fails: cudaGraphLaunch: an illegal memory access"):
        calls.launch(graph)


def test_a_graph_goes_with_who_has_it(cuda: ctypes.CDLL) -> None:
    calls, steps = GraphCalls(cuda), Steps(cuda)
    stream = calls.stream()
    graphs = [calls.record(stream, lambda: steps.put(stream)) for _ in range(3)]
    assert cuda.standInGraphs() == 3
    del graphs[0]
    gc.collect()
    assert cuda.standInGraphs() == 2
    graphs.clear()
    gc.collect()
    assert cuda.standInGraphs() == 0


def test_memory_is_filled_in_the_order_of_its_stream(cuda: ctypes.CDLL) -> None:
    calls = GraphCalls(cuda)
    stream, memory = calls.stream(), np.zeros(16, np.uint8)
    calls.fill(memory.ctypes.data, 255, 16, stream)
    calls.fill(memory.ctypes.data, 1, 8, stream)
    calls.fill(memory.ctypes.data, 9, 0, stream)
    calls.wait(stream)
    assert memory.tolist() == [1] * 8 + [255] * 8


def test_graphs_are_for_gpus_that_were_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = TensorSpec("x", (1,), "float32")
    blob = BlobSpec("0" * 64, 1)
    stages: dict[str, Any] = {
        device: (StageSpec(0, "s", "A", (), device, blob, (), (x,), (x,)),) for device in ("cpu", "cuda")
    }
    monkeypatch.delenv(CUDA_GRAPHS.variable, raising=False)
    assert stage_graphs(stages["cuda"]) is None
    monkeypatch.setenv(CUDA_GRAPHS.variable, "1")
    assert stage_graphs(stages["cpu"]) is None
    assert stage_graphs(()) is None
    if runtime_library() is not None:
        assert isinstance(stage_graphs(stages["cuda"]), GraphCalls)


def test_cudas_runtime_has_the_functions() -> None:
    require_toolkit()
    real = runtime_library()
    assert real is not None
    GraphCalls(real)
