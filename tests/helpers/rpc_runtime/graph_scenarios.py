"""Stages as CUDA graphs on an emulated machine: ``python -m``, in the environment of `emulated_machine`, with a bundle.

TVM's machine and its library for GPUs are the real ones. Says in JSON, for each scenario, what went wrong, if anything.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_split
from tvm_split.rpc_runtime.errors import StageError
from tvm_split.rpc_runtime.execution import stage_graph
from tvm_split.rpc_runtime.execution.blob_store import read_blob
from tvm_split.rpc_runtime.execution.cuda_calls import CudaCalls
from tvm_split.rpc_runtime.execution.cuda_graphs import GraphCalls
from tvm_split.rpc_runtime.execution.cuda_runtime import load_cuda, runtime_library
from tvm_split.rpc_runtime.execution.device_transfers import DeviceTransfers, OverlappedStage
from tvm_split.rpc_runtime.execution.stage_executable import StageExecutable, WeightCache, tensor_bytes
from tvm_split.rpc_runtime.execution.stage_graph import RecordedStage, as_graph
from tvm_split.rpc_runtime.program.measurements import RECORDED
from tvm_split.rpc_runtime.program.program import StageSpec

CALLS = ("cudaStreamCreateWithFlags", "cudaMemsetAsync", "cudaStreamSynchronize", "cudaStreamBeginCapture")
CALLS += ("cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch", "cudaMalloc")
HOSTS_FUNCTION = "tests.of_the_host"
"""What the library at ``host.so`` calls in the place of a kernel."""


class Machine:
    """An emulated one, with the stages of a bundle."""

    def __init__(self, folder: Path) -> None:
        assert not load_cuda()
        library = runtime_library()
        assert library is not None
        library.standInSlow(0)
        self.cuda, self.folder, self.device = library, folder, tvm.cuda(0)
        self.bundle = tvm_split.Bundle.load(folder / "bundle")
        self.stages = self.bundle.program.stages
        self.calls = GraphCalls(library)

    def load(self, stage: StageSpec) -> StageExecutable:
        library = read_blob(self.bundle.blob_path(stage.library.sha256), stage.library)
        weights = (read_blob(self.bundle.blob_path(each.blob.sha256), each.blob) for each in stage.weights)
        return StageExecutable(stage, library, weights, WeightCache())

    def inputs(self, stage: StageSpec, seed: int) -> list[Any]:
        values = np.random.default_rng(seed)
        return [
            tvm.runtime.tensor(values.standard_normal(spec.shape).astype(spec.dtype), self.device)
            for spec in stage.inputs
        ]

    def wait(self) -> None:
        self.calls.wait()


def values(outputs: Any) -> list[bytes]:
    return [tensor_bytes(each).tobytes() for each in outputs]


def a_graph_gives_what_its_stage_gives_each_time(machine: Machine) -> None:
    for stage in machine.stages:
        plain = machine.load(stage)
        graph = RecordedStage(machine.load(stage), machine.calls, machine.wait)
        before = machine.cuda.standInKernels(), machine.cuda.standInLaunched()
        held = []
        for seed in range(4):
            held.append((seed, graph.run(machine.inputs(stage, seed))))
        assert machine.cuda.standInKernels() == before[0]
        assert machine.cuda.standInLaunched() == before[1] + 4
        for seed, outputs in held:  # no later run has changed them
            assert values(outputs) == values(plain.run(machine.inputs(stage, seed))), (stage.name, seed)


def memory_between_its_kernels_is_nobody_elses(machine: Machine) -> None:
    """Stages that run kernel by kernel take turns with graphs, in one thread, and hold what they have made."""
    graphs = [RecordedStage(machine.load(stage), machine.calls, machine.wait) for stage in machine.stages]
    plain = [machine.load(stage) for stage in machine.stages]
    expected = {
        (number, seed): values(each.run(machine.inputs(each.stage, seed)))
        for number, each in enumerate(plain)
        for seed in range(2)
    }
    held: list[tuple[Any, ...]] = []
    for seed in range(2):
        for number in (*range(len(plain)), *reversed(range(len(plain)))):
            for runnable in (plain[number], graphs[number]):
                held.append((number, seed, runnable.run(machine.inputs(runnable.stage, seed))))
    for number, seed, outputs in held:
        assert values(outputs) == expected[number, seed], (number, seed)


def many_record_and_run_at_once(machine: Machine) -> None:
    """Deployments of one worker: some record while others allocate, lock pages, upload, and launch."""
    failures: list[str] = []

    def deployment(number: int) -> None:
        stage = machine.stages[number % len(machine.stages)]
        transfers = DeviceTransfers(
            CudaCalls(machine.cuda), lambda spec: tvm.runtime.empty(spec.shape, spec.dtype, machine.device)
        )
        try:
            plain = machine.load(stage)
            for _ in range(2):
                runnable, found = as_graph(machine.load(stage), machine.calls, transfers.end)
                assert found == RECORDED, found
                graph = OverlappedStage(runnable, transfers)
                for seed in range(3):
                    expected = values(plain.run(machine.inputs(stage, seed)))
                    slots = [transfers.slot(spec) for spec in stage.inputs]
                    for slot, value in zip(slots, machine.inputs(stage, seed), strict=True):
                        slot.fill(value)
                    given: list[Any] = [
                        transfers.upload(spec, slot.value) for spec, slot in zip(stage.inputs, slots, strict=True)
                    ]
                    found_values = [bytes(transfers.bytes_of(each)) for each in graph.run(given)]
                    assert found_values == expected, (stage.name, seed)
                    for spec, each in zip(stage.inputs, given, strict=True):
                        transfers.give_back(spec, each)
        except BaseException:
            failures.append(traceback.format_exc())
        finally:
            transfers.close()

    machine.cuda.standInSlow(300)
    threads = [threading.Thread(target=deployment, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    machine.cuda.standInSlow(0)
    assert not failures, "\n".join(failures)


def what_fails_leaves_the_stage_as_it_was(machine: Machine) -> None:
    stage = machine.stages[0]
    executable = machine.load(stage)
    inputs = machine.inputs(stage, 1)
    expected = values(executable.run(inputs))
    before = machine.cuda.standInGraphs()
    for call in CALLS:
        if call == "cudaMalloc":  # or there is enough in TVM's pool
            tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()
        machine.cuda.standInFailIn(call.encode(), 700)
        runnable, reason = as_graph(executable, machine.calls, machine.wait)
        machine.cuda.standInFailIn(b"", 0)
        assert runnable is executable, call
        assert call in reason or call == "cudaMalloc", (call, reason)
        assert "illegal memory access" in reason or call == "cudaMalloc", (call, reason)
        gc.collect()
        assert machine.cuda.standInGraphs() == before, call
        assert values(executable.run(inputs)) == expected, call
    runnable, found = as_graph(executable, machine.calls, machine.wait)
    assert found == RECORDED
    assert values(runnable.run(inputs)) == expected


def what_fails_in_a_run_is_the_stages_error(machine: Machine) -> None:
    stage = machine.stages[0]
    graph = RecordedStage(machine.load(stage), machine.calls, machine.wait)
    for call in ("cudaMemcpyAsync", "cudaGraphLaunch", "cudaStreamSynchronize"):
        inputs = machine.inputs(stage, 1)
        machine.cuda.standInFailIn(call.encode(), 700)
        try:
            with pytest.raises(StageError, match=f"stage {stage.name!r}.*{call}"):
                graph.run(inputs)
        finally:
            machine.cuda.standInFailIn(b"", 0)


def what_is_dropped_frees_its_graph_and_thread(machine: Machine) -> None:
    before, threads = machine.cuda.standInGraphs(), threading.active_count()
    graphs = [RecordedStage(machine.load(stage), machine.calls, machine.wait) for stage in machine.stages]
    assert machine.cuda.standInGraphs() == before + len(graphs)
    own = [each for each in threading.enumerate() if each.name.startswith("graph-")]
    assert len(own) >= len(graphs)
    del graphs
    gc.collect()
    assert machine.cuda.standInGraphs() == before
    for each in own:
        each.join(60)
    assert threading.active_count() <= threads


def what_calls_the_host_is_not_recorded(machine: Machine) -> None:
    """Its values would be right in the recorded run, and the same for ever."""

    def of_the_host(x: Any) -> Any:
        return tvm.runtime.tensor(x.numpy() * 2, machine.device)

    tvm_ffi.register_global_func(HOSTS_FUNCTION, of_the_host)
    (x,) = machine.stages[0].inputs
    spec = replace(x, shape=(2, 8))
    content = np.fromfile(machine.folder / "host.so", np.uint8)
    stage = StageSpec(0, "host", "A", ("host",), "cuda", machine.stages[0].library, (), (spec,), (spec,))
    executable = StageExecutable(stage, content, (), WeightCache())
    runnable, reason = as_graph(executable, machine.calls, machine.wait)
    assert runnable is executable
    assert reason == f"it calls {HOSTS_FUNCTION}, which cannot be recorded", reason
    value = np.random.default_rng(0).standard_normal((2, 8)).astype("float32")
    (output,) = runnable.run([tvm.runtime.tensor(value, machine.device)])
    assert np.array_equal(output.numpy(), value * 2)


def a_graph_that_gives_other_values_is_refused(machine: Machine) -> None:
    """As if something of a run were missing in its recording: here, the last half of it."""

    class Half(GraphCalls):
        def record(self, stream: Any, put: Callable[[], object]) -> Any:
            return super().record(stream, lambda: None)

    executable = machine.load(machine.stages[0])
    runnable, reason = as_graph(executable, Half(machine.cuda), machine.wait)
    assert runnable is executable
    assert reason == "what was recorded gives other values than the stage itself", reason


def others_machines_have_their_own_memory(machine: Machine) -> None:
    """What another thread loads while one is recorded may find the function that hands out the same again."""
    memory = stage_graph.RunMemory(tvm_ffi.get_global_func(stage_graph.ALLOCATE))
    given: list[Any] = []

    def other() -> None:
        library = machine.load(machine.stages[0])
        own = stage_graph._machine(library.library, machine.device, memory)
        for seed in (0, 1):
            given.append(values(own["main"](*machine.inputs(library.stage, seed), *library.weights)))
            given.append(values(library.run(machine.inputs(library.stage, seed))))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(100)
    assert memory.held == []
    assert given[0] == given[1] != given[2] == given[3]


SCENARIOS: tuple[Callable[[Machine], None], ...] = (
    a_graph_gives_what_its_stage_gives_each_time,
    memory_between_its_kernels_is_nobody_elses,
    many_record_and_run_at_once,
    what_fails_leaves_the_stage_as_it_was,
    what_fails_in_a_run_is_the_stages_error,
    what_is_dropped_frees_its_graph_and_thread,
    what_calls_the_host_is_not_recorded,
    a_graph_that_gives_other_values_is_refused,
    others_machines_have_their_own_memory,
)


def main(folder: str) -> None:
    machine = Machine(Path(folder))
    found = {}
    for scenario in SCENARIOS:
        try:
            scenario(machine)
            found[scenario.__name__] = ""
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
