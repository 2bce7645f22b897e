"""Runs a program's stages in turn in this process: no workers, no network. For debugging, and to time stages alone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import tvm_ffi

from rpc_runtime.blob_store import read_blob
from rpc_runtime.errors import TvmSplitError, WorkerError
from rpc_runtime.inputs import checked_inputs
from rpc_runtime.interface import Array
from rpc_runtime.measurements import COMPUTE, Recorder, StageStatistics, TraceEvent, now
from rpc_runtime.program import Program
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.stage_executable import CallTime, StageExecutable, WeightCache, array_from_tensor, tensor_from_array

Result = TypeVar("Result")


class InProcessPipeline:
    """The same stages as a ``Pipeline`` computes, with the same results, one after another. A context manager.

    TVM keeps a pool of workers per calling thread and fixes its size when it first needs it. Stages run on the caller's
    thread where its pool has ``threads`` threads or is yet to be made (a network of 6 ms gains half a millisecond: its
    data stay in that core's cache), else, or without ``on_calling_thread``, on a thread of the pipeline's own. Two such
    pipelines of different ``threads`` that run at the same time in two threads would disturb each other; one after the
    other they do not.

    Raises:
        WorkerError: a stage cannot run on this machine.
        BlobError: a library or weight is missing or damaged.
    """

    def __init__(
        self,
        program: Program,
        blob_path: Callable[[str], Path],
        threads: int = 1,
        *,
        on_calling_thread: bool = True,
    ) -> None:
        self._program = program
        self._threads = threads
        self._on_calling_thread = on_calling_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tvm-split-in-process")
        self._busy = threading.Lock()
        self._recorders = {
            machine: Recorder(machine, [stage.name for stage in program.stages_on(machine)])
            for machine in program.machines
        }
        cache = WeightCache()
        self._stages: list[StageExecutable] = []
        self._closed = False
        with ScratchFolder("in-process") as scratch:
            for stage in program.stages:
                library = read_blob(blob_path(stage.library.sha256), stage.library)
                weights = (read_blob(blob_path(weight.blob.sha256), weight.blob) for weight in stage.weights)
                self._stages.append(StageExecutable(stage, library, weights, scratch.path, cache))
        self._sequence = 0

    @property
    def program(self) -> Program:
        return self._program

    @property
    def blob_bytes_sent(self) -> int:
        return 0

    def run(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs for one micro-batch. Raises InputError, StageError."""
        return self._on_a_pool_of_threads(self._compute, checked_inputs(self._program, inputs))

    def call_times(self, inputs: Sequence[Array]) -> dict[str, list[CallTime]]:
        """By stage, how long each function that its library calls took for one micro-batch; of replicas the first."""
        return self._on_a_pool_of_threads(self._time_calls, checked_inputs(self._program, inputs))

    def _on_a_pool_of_threads(self, compute: Callable[[Sequence[Array]], Result], arrays: Sequence[Array]) -> Result:
        if self._closed:
            raise WorkerError("this pipeline is closed")
        if not self._busy.acquire(blocking=False):
            raise TvmSplitError("this pipeline is running already, in another thread: open a second one")
        try:
            # TVM asks the environment anew at every parallel loop.
            with _environment(TVM_NUM_THREADS=str(self._threads), TVM_BIND_THREADS="0"):
                if self._on_calling_thread and _pool_of_this_thread() == self._threads:
                    return compute(arrays)
                return self._thread.submit(compute, arrays).result()
        finally:
            self._busy.release()

    def stream(self, batches: Iterable[Sequence[Array]]) -> Iterator[tuple[Array, ...]]:
        """The outputs for each batch in turn."""
        for batch in batches:
            yield self.run(batch)

    def _compute(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        sequence, self._sequence = self._sequence, self._sequence + 1
        given = {tensor.name: array for tensor, array in zip(self._program.inputs, arrays, strict=True)}
        values: dict[str, Any] = {name: tensor_from_array(array) for name, array in given.items()}
        for loaded in self._stages:
            stage = loaded.stage
            if sequence not in stage.own_turns:
                continue
            start = now()
            outputs = loaded.run([values[tensor.name] for tensor in stage.inputs])
            self._recorders[stage.machine].record(COMPUTE, stage.name, sequence, start, now())
            values.update((tensor.name, value) for tensor, value in zip(stage.outputs, outputs, strict=True))
        return tuple(
            given[tensor.name].copy() if tensor.name in given else array_from_tensor(values[tensor.name], tensor)
            for tensor in self._program.outputs
        )

    def _time_calls(self, arrays: Sequence[Array]) -> dict[str, list[CallTime]]:
        values: dict[str, Any] = {
            tensor.name: tensor_from_array(array) for tensor, array in zip(self._program.inputs, arrays, strict=True)
        }
        times = {}
        for loaded in self._stages:
            stage = loaded.stage
            if stage.replica != 0:
                continue
            taken = [values[tensor.name] for tensor in stage.inputs]
            times[stage.name] = loaded.call_times(taken)
            values.update(zip((tensor.name for tensor in stage.outputs), loaded.run(taken), strict=True))
        return times

    def statistics(self) -> tuple[StageStatistics, ...]:
        found = {
            (stage.machine, stage.name): stage
            for recorder in self._recorders.values()
            for stage in recorder.statistics()
        }
        return tuple(found[stage.machine, stage.name] for stage in self._program.stages)

    def trace(self) -> tuple[TraceEvent, ...]:
        events = [event for recorder in self._recorders.values() for event in recorder.trace()]
        return tuple(sorted(events, key=lambda event: event.start_nanoseconds))

    def close(self) -> None:
        """Frees libraries and weights."""
        self._closed = True
        self._thread.shutdown()
        self._stages.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _pool_of_this_thread() -> int:
    """How many threads TVM uses for the calling one; the environment decides where this is asked first."""
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """The environment with some variables set, and afterwards as it was."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
