"""Runs a program's stages one after another in this process, without workers or network, to debug or time them."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.blob_store import read_blob
from rpc_runtime.execution.loaded_stage import (
    LoadedStage,
    WeightCache,
    array_from_tensor,
    on_host,
    tensor_from_array,
    tensor_slot,
)
from rpc_runtime.execution.observed_stage import ObservedStage
from rpc_runtime.processes import OwnProcess
from rpc_runtime.program.events import COMPUTE, Observation, Recorder, now
from rpc_runtime.program.inputs import checked_inputs, client_arrays, flat_bytes
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.program.runner import Outputs, Runner
from rpc_runtime.program.specs import Array, TensorSpec, weight_bytes

Result = TypeVar("Result")

_ENVIRONMENT = threading.Lock()


class ComputingThread:
    """A thread that runs TVM's kernels with ``threads`` threads. Only one such thread of a process computes at a time.

    TVM has a thread pool for each thread that calls it. A process that is forked from such a thread never exits, so the
    user's thread must not call TVM.
    """

    def __init__(self, threads: int) -> None:
        self._variables = {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tvm-split-in-process")

    def submit(self, compute: Callable[[], Result]) -> Future[Result]:
        """Queue a function; return the future of its result. Raises `RuntimeError` after `close`."""
        return self._thread.submit(self._run, compute)

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, compute: Callable[[], Result]) -> Result:
        with _ENVIRONMENT:  # TVM reads the environment at every parallel loop
            before = {name: os.environ.get(name) for name in self._variables}
            os.environ.update(self._variables)
            try:
                return compute()
            finally:
                for name in self._variables:
                    os.environ.pop(name)
                os.environ.update({name: value for name, value in before.items() if value is not None})


OnTransfer = Callable[[Route, Array], Array]


_Values = dict[str | tuple[str, str], Any]
"""The tensors of one micro-batch: as made, by name; and as received, by (name, destination)."""


class InProcessRunner(Runner):
    """Runs the stages of a program one after another, with the results that workers return. A context manager.

    Stages run on a `ComputingThread`, which computes micro-batches in the order of the calls. ``on_transfer`` is
    called once per route with a copy of each tensor that a link would carry; it returns the tensor as received.

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
        on_transfer: OnTransfer | None = None,
    ) -> None:
        self._on_transfer = on_transfer
        self.program, self.machines = program, program.machines
        # What each machine would hold if it were a separate process.
        self.weight_bytes = {machine: weight_bytes(program.stages_on(machine)) for machine in program.machines}
        self._thread = ComputingThread(threads)
        self._own_process = OwnProcess()
        self._recorders = {machine: Recorder() for machine in program.machines}
        self._tracks = [self._recorders[stage.machine].track(COMPUTE, stage.name) for stage in program.stages]
        # New memory for each micro-batch would take ten times as long to write.
        self._inputs = {tensor.name: tensor_slot(tensor) for tensor in program.client_tensors}
        cache = WeightCache()
        self._stages: list[ObservedStage] = []
        self._closed = False
        for stage in program.stages:
            library = read_blob(blob_path(stage.library.sha256), stage.library)
            loaded = LoadedStage(stage, library, lambda blob: read_blob(blob_path(blob.sha256), blob), cache)
            self._stages.append(ObservedStage(loaded, self._recorders[stage.machine]))
        self._sequence = 0

    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        """Queue one micro-batch; return the future of its outputs. The inputs must not change until that is done."""
        arrays = checked_inputs(self.program.inputs, inputs)
        self._own_process.require()
        try:
            return self._thread.submit(partial(self._compute, arrays))
        except RuntimeError as error:
            raise WorkerError("this pipeline is closed") from error

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        """Yield the outputs of each micro-batch in order, each computed when it is requested. Raises as `run`."""
        for batch in batches:
            yield self.run(batch)

    def _compute(self, arrays: Sequence[Array]) -> Outputs:
        if self._closed:
            raise WorkerError("this pipeline is closed")
        sequence, self._sequence = self._sequence, self._sequence + 1
        client_tensors = self.program.client_tensors
        by_name = dict(
            zip((tensor.name for tensor in client_tensors), client_arrays(self.program, arrays), strict=True)
        )
        values: _Values = {}
        for tensor in client_tensors:
            self._inputs[tensor.name].data[:] = flat_bytes(by_name[tensor.name])
            self._keep(tensor, self._inputs[tensor.name].value, sequence, values)
        for observed, track in zip(self._stages, self._tracks, strict=True):
            stage = observed.loaded.stage
            if sequence not in stage.micro_batches:
                continue
            inputs = [_value_at(stage.machine, tensor, values) for tensor in stage.inputs]
            if stage.device == "cpu":
                inputs = [on_host(tensor) for tensor in inputs]
            start = now()
            outputs = observed.run(inputs, sequence)
            self._recorders[stage.machine].record(track, sequence, start, now())
            for tensor, value in zip(stage.outputs, outputs, strict=True):
                self._keep(tensor, value, sequence, values)
        results = (
            by_name[tensor.name].copy()
            if tensor.name in by_name
            else array_from_tensor(_value_at(CLIENT, tensor, values), tensor)
            for tensor in self.program.outputs
        )
        return Outputs.of(self.program, results)

    def _keep(self, tensor: TensorSpec, value: Any, sequence: int, values: _Values) -> None:
        """Add a tensor to ``values``: as it was made and, with ``on_transfer``, as each destination receives it."""
        values[tensor.name] = value
        if self._on_transfer is None:
            return
        for route in self.program.routes:
            if route.tensor.name == tensor.name and sequence in route.when:
                array = self._on_transfer(route, array_from_tensor(value, tensor))
                values[tensor.name, route.destination] = tensor_from_array(array)

    def observe(
        self,
        since: Mapping[str, int] | None = None,
        timeout_seconds: float | None = None,
        kernels: int = 0,
        refused: dict[str, str] | None = None,
    ) -> dict[str, Observation]:
        for stage in self._stages if kernels else ():
            stage.record_next(kernels)
        return {
            machine: recorder.observe(None if since is None else since.get(machine, 0))
            for machine, recorder in self._recorders.items()
        }

    def links(self) -> tuple[LinkStatistics, ...]:
        """Return (): there are no links in one process."""
        return ()

    def close(self) -> None:
        """Free libraries and weights."""
        if not self._own_process.is_this:
            return
        self._closed = True
        self._thread.close()
        self._stages.clear()


def _value_at(destination: str, tensor: TensorSpec, values: _Values) -> Any:
    """Return a tensor as it is received at ``destination``, a machine or the client."""
    return values.get((tensor.name, destination), values[tensor.name])
