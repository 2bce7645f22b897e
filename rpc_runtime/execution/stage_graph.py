"""A GPU's stage as one CUDA graph: its kernels are recorded when it is loaded, and launched together from then on.

What a launch costs the host, a network of many small kernels pays once for each of them, and a graph once:

    load    on a stream of its own:       two runs ▸ one that is recorded ▸ memory overwritten ▸ graph ▸ same values?
    run     on that of TVM's kernels:     inputs ─copies─▶ the graph's ▸ graph ▸ the graph's outputs ─copies─▶ outputs

Nothing of it can fail a stage that runs without: where it cannot be recorded, or gives other values, the stage runs
kernel by kernel, and says why. Why it is safe beside all else that a worker does (TVM 0.27):

- Kernels are launched on the stream that their thread has set (``TVMFFIEnvGetStream``), so that all kernels of a run
  are recorded; `run_memory` knows what else a run may call. Nothing that TVM's machine itself does waits for a device.
- The machine's memory comes from a pool that the whole process shares: what a run gives back, others have next. So the
  machine that is recorded gets memory from `RunMemory`, which keeps it, and gives it to each run again.
- Kernels that are several in one function have memory between them from a pool of each thread, which frees what is too
  small for the next one. So the thread that recorded a stage runs nothing else, and lives as long as the stage.
- The first run loads modules and takes memory, which may not be done while something is recorded.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.runtime.vm import VirtualMachine

from tvm_split.rpc_runtime.execution.cuda_calls import Stream
from tvm_split.rpc_runtime.execution.cuda_graphs import Graph, GraphCalls
from tvm_split.rpc_runtime.execution.cuda_runtime import runtime_library
from tvm_split.rpc_runtime.execution.executor import RunnableStage
from tvm_split.rpc_runtime.execution.run_memory import NotRecordable, RunMemory, require_recordable
from tvm_split.rpc_runtime.execution.stage_executable import (
    StageExecutable,
    Tensor,
    first_line,
    require_announced,
    run_failure,
    size_of,
    tensor_bytes,
)
from tvm_split.rpc_runtime.execution.switches import CUDA_GRAPHS
from tvm_split.rpc_runtime.program.measurements import RECORDED
from tvm_split.rpc_runtime.program.program import StageSpec, TensorSpec

logger = logging.getLogger(__name__)

ALLOCATE, VIEW = "vm.builtin.alloc_storage", "vm.builtin.alloc_tensor"
UNUSUAL = 0xFF
"""In every byte: NaN, or -1."""

_making = threading.Lock()
"""While a name of TVM's is another function."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """A graph, and all that it needs to be there."""

    graph: Graph
    inputs: list[Tensor]
    outputs: list[Tensor]
    memory: RunMemory
    machine: VirtualMachine
    weights: list[Tensor]
    stream: Stream


class RecordedStage:
    """A stage that is launched as one graph; ``finish`` returns when all is done that was launched.

    Raises:
        Exception: it cannot be recorded; TVM's and CUDA's errors, and `NotRecordable`.
    """

    def __init__(self, executable: StageExecutable, calls: GraphCalls, finish: Callable[[], None]) -> None:
        self._stage, self._calls, self._finish = executable.stage, calls, finish
        # Ends when nobody has this any more.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"graph-{executable.stage.name}")
        try:
            self._recording = self._thread.submit(_recording, executable, calls).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._allocate = tvm_ffi.get_global_func(ALLOCATE)
        self._view = tvm_ffi.get_global_func(VIEW)

    @property
    def stage(self) -> StageSpec:
        return self._stage

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """As `StageExecutable.run`, of tensors of the device."""
        stage, recording = self._stage, self._recording
        try:
            for spec, given, own in zip(stage.inputs, inputs, recording.inputs, strict=True):
                self._calls.copy(given.data_ptr(), own.data_ptr(), spec.size_bytes)
            self._calls.launch(recording.graph)
            outputs = [self._empty(spec) for spec in stage.outputs]
            for spec, own, output in zip(stage.outputs, recording.outputs, outputs, strict=True):
                self._calls.copy(own.data_ptr(), output.data_ptr(), spec.size_bytes)
            self._finish()
        except Exception as error:
            raise run_failure(stage, error) from error
        return outputs

    def _empty(self, spec: TensorSpec) -> Tensor:
        """Memory of the device, from the pool that the outputs of other stages come from."""
        shape = tvm_ffi.Shape((spec.size_bytes,))
        storage = self._allocate(self._recording.memory.context, shape, 0, tvm_ffi.dtype("uint8"), "global")
        return self._view(storage, 0, tvm_ffi.Shape(spec.shape), tvm_ffi.dtype(spec.dtype))


def stage_graphs(stages: Sequence[StageSpec]) -> GraphCalls | None:
    """For the stages of a machine with a GPU, where ``$TVM_SPLIT_CUDA_GRAPHS`` is 1.

    Raises:
        InputError: it is neither 0 nor 1.
    """
    if not CUDA_GRAPHS.is_on or not any(stage.device == "cuda" for stage in stages):
        return None
    library = runtime_library()
    return None if library is None else GraphCalls(library)


def as_graph(executable: StageExecutable, calls: GraphCalls, finish: Callable[[], None]) -> tuple[RunnableStage, str]:
    """The stage as a graph and `RECORDED`, or, where that cannot be, as it is, and why."""
    try:
        return RecordedStage(executable, calls, finish), RECORDED
    except Exception as error:
        reason = first_line(error)
        stage = executable.stage
        logger.warning("stage %r on machine %r runs kernel by kernel: %s", stage.name, stage.machine, reason)
        return executable, reason


def _recording(executable: StageExecutable, calls: GraphCalls) -> _Recording:
    """In the calling thread, which must run nothing else as long as it is used."""
    stage, device, weights = executable.stage, executable.device, executable.weights
    memory = RunMemory(tvm_ffi.get_global_func(ALLOCATE))
    machine = _machine(executable.library, device, memory)
    called: list[str] = []
    machine.set_instrument(lambda function, name, before, value, *arguments: called.append(name) if before else None)
    main = machine["main"]
    inputs = [tvm.runtime.empty(spec.shape, spec.dtype, device) for spec in stage.inputs]
    stream = calls.stream()
    for tensor in inputs:
        calls.fill(tensor.data_ptr(), 0, size_of(tensor), stream)
    calls.wait()  # weights came on TVM's stream

    def run() -> list[Tensor]:
        memory.begin()
        found = main(*inputs, *weights)
        require_announced(found, stage)
        return list(found)

    with tvm_ffi.use_raw_stream(device, stream.address):
        for _ in range(2):  # the pool of the thread has by then what it needs, in whatever order it was asked for
            outputs = run()
        require_recordable(called, lambda name: executable.library.implements_function(name, True))
        calls.wait(stream)
        expected = [tensor_bytes(output).copy() for output in outputs]
        graph = calls.record(stream, run)
    view = tvm_ffi.get_global_func(VIEW)
    for request, storage in memory.held:
        if request[1] == 0:
            size_bytes = _size_bytes(request)
            all_of_it = view(storage, 0, tvm_ffi.Shape((size_bytes,)), tvm_ffi.dtype("uint8"))
            calls.fill(all_of_it.data_ptr(), UNUSUAL, size_bytes, stream)
    calls.launch(graph, stream)
    calls.wait(stream)
    if not all(np.array_equal(before, tensor_bytes(after)) for before, after in zip(expected, outputs, strict=True)):
        raise NotRecordable("what was recorded gives other values than the stage itself")
    return _Recording(graph, inputs, outputs, memory, machine, weights, stream)


def _machine(library: Any, device: Any, memory: RunMemory) -> VirtualMachine:
    """One of its own, since an instrument stays; it looks up names once, when it is made."""
    with _making:
        own = tvm_ffi.get_global_func(ALLOCATE)
        tvm_ffi.register_global_func(ALLOCATE, memory.give, override=True)
        try:
            return VirtualMachine(library, device)
        finally:
            tvm_ffi.register_global_func(ALLOCATE, own, override=True)


def _size_bytes(request: Any) -> int:
    shape, _, dtype, _ = request
    return int(math.prod(shape) * np.dtype(dtype).itemsize)
