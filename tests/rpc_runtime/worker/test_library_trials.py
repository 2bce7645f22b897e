"""Libraries that crash, hang or are damaged: their sender gets an error; the worker and other deployments continue."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from tvm import te
from tvm.relax import op

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.execution.loaded_stage import library_file
from rpc_runtime.program.measurements import KernelSet, TimedKernel
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, TensorSpec
from rpc_runtime.wire.messages import load_request
from rpc_runtime.worker.library_trials import IDLE_SECONDS
from tests.helpers.rpc_runtime.pipelines import open_on, send_blobs, watched
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.rpc_runtime.raw_calls import METHODS, RawCaller
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorkers]:
    with LocalWorkers([A]) as started:
        yield started


def compiled(maker: ProgramMaker, code: str) -> BlobSpec:
    """Return a library that runs this C code when it is loaded."""
    source, library = maker.folder / "crash.c", maker.folder / "crash.so"
    source.write_text(f"#include <stdio.h>\n__attribute__((constructor)) static void begin(void) {{ {code} }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return maker.blob(library.read_bytes())


def with_library(program: Program, library: BlobSpec) -> Program:
    return replace(program, stages=(replace(program.stages[0], library=library), *program.stages[1:]))


ILLEGAL = {"x86_64": "__builtin_trap();", "aarch64": '__asm__ volatile(".inst 0");'}[os.uname().machine]
CRASHES = [
    (ILLEGAL, "crashed with SIGILL .*more instructions than this one"),
    ("*(volatile int *)0 = 0;", "crashed with SIGSEGV"),
    ("extern void _exit(int); _exit(3);", "exit code 3"),
]
HANG = "extern int pause(void); for (;;) pause();"
needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_a_compiler
@pytest.mark.parametrize(("code", "words"), CRASHES)
def test_a_library_that_crashes(worker: LocalWorkers, maker: ProgramMaker, code: str, words: str) -> None:
    program = one_stage(maker)
    crashing = with_library(program, compiled(maker, code))
    crashing = replace(crashing, stages=(replace(crashing.stages[0], target="x86-64-v4"),))
    with open_on(worker, program, maker) as beside:
        batch = batches_for(program, 1)[0]
        with pytest.raises(WorkerError, match=f"stage 'one' on machine '{A}', compiled for x86-64-v4: .*{words}"):
            open_on(worker, crashing, maker)
        np.testing.assert_array_equal(beside.run(batch)[0], 2 * batch[0])


@needs_a_compiler
def test_a_library_that_hangs(worker: LocalWorkers, maker: ProgramMaker) -> None:
    program = with_library(one_stage(maker), compiled(maker, HANG))
    with pytest.raises(WorkerError, match=r"stage 'one'.*did not finish within [67] s"):
        open_on(worker, program, maker, timeout_seconds=3.0)
    (trials,) = psutil.Process(worker.process_ids[A]).children()
    eventually(lambda: not trials.children(), "the hanging trial has ended")


def test_an_ended_process_of_trials_leaves_no_zombie(worker: LocalWorkers, maker: ProgramMaker, tmp_path: Path) -> None:
    process = psutil.Process(worker.process_ids[A])
    with open_on(worker, one_stage(maker), maker):
        (trials,) = process.children()
        trials.kill()
        eventually(lambda: not process.children(), "the worker has reaped it, though it tries out nothing")


@pytest.mark.long
def test_the_process_of_trials_stays_as_long_as_a_deployment(own_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """A deployment that takes over the stages of another machine should not wait for the process to start."""
    process = psutil.Process(own_workers.process_ids[A])
    with open_on(own_workers, one_stage(maker), maker):
        (trials,) = process.children()
        time.sleep(1.1 * IDLE_SECONDS)
        assert process.children() == [trials]
    eventually(lambda: not process.children(), "it ends after the last deployment")


@needs_a_compiler
def test_a_trial_ends_with_its_caller(worker: LocalWorkers, maker: ProgramMaker, tmp_path: Path) -> None:
    """A trial that would take minutes is ended, and the next caller is served."""
    program = one_stage(maker)
    with RawCaller(worker.endpoints[A]) as caller, watched(worker.endpoints[A]) as connection:
        hanging = with_library(program, compiled(maker, HANG))
        plan = hanging.on(A)
        blobs = [blob for stage in plan.stages for blob in stage.blobs]
        send_blobs(connection, blobs, maker)
        request = load_request(connection.deployment, hanging, A, {}).SerializeToString()
        call = caller.begin(METHODS["LoadStages"].path, [request], 1000)
        process = psutil.Process(worker.process_ids[A])
        eventually(lambda: any(child.children() for child in process.children()), "a trial runs")
        call.cancel()
        next_program = one_stage(ProgramMaker(tmp_path))
        with open_on(worker, next_program, ProgramMaker(tmp_path), timeout_seconds=PATIENCE_SECONDS) as pipeline:
            pipeline.run(batches_for(next_program, 1)[0])


@needs_a_compiler
def test_what_crashed_is_not_tried_again(worker: LocalWorkers, maker: ProgramMaker, tmp_path: Path) -> None:
    """Otherwise it might pass the next trial, and crash in the worker later."""
    crashed = tmp_path / "crashed"
    code = f'if (!fopen("{crashed}", "r")) {{ fopen("{crashed}", "w"); {CRASHES[1][0]} }}'
    program = with_library(one_stage(maker), compiled(maker, code))
    for _ in range(2):
        with pytest.raises(WorkerError, match="crashed with SIGSEGV"):
            open_on(worker, program, maker)


def test_the_file_of_a_library_cannot_be_changed_after_it_was_verified() -> None:
    with library_file(np.frombuffer(b"verified", np.uint8)) as descriptor:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(descriptor, 0)


def test_zeros_are_no_divisors(worker: LocalWorkers, maker: ProgramMaker) -> None:
    """This is not the library's fault: a processor traps at an integer division by zero."""
    dividend, divisor = maker.input("left", (64,), "int32"), maker.input("right", (64,), "int32")
    program = maker.program([maker.stage("one", A, [dividend, divisor], lambda a, b: [op.floor_divide(a, b)])])
    values = np.arange(64, dtype=np.int32)
    with open_on(worker, program, maker) as pipe:
        (result,) = pipe.run([values, values + 1])
    np.testing.assert_array_equal(result, values // (values + 1))


def test_a_kernel_that_crashes(worker: LocalWorkers, maker: ProgramMaker) -> None:
    """It reads far outside of its table."""
    table, index = te.placeholder((5, 8), name="table"), te.placeholder((3,), "int64", name="index")
    kernel = te.create_prim_func([table, index, te.compute((3, 8), lambda i, j: table[index[i] + (1 << 40), j])])
    path = maker.folder / "kernels.so"
    module = tvm.IRModule({"far": kernel.with_attr("global_symbol", "far")})
    tvm.tirx.build(module, tvm.target.Target("llvm")).export_library(str(path))
    arguments = [TensorSpec("", (5, 8), "float32"), TensorSpec("", (3,), "int64"), TensorSpec("", (3, 8), "float32")]
    timed = TimedKernel("far", tuple(arguments), frozenset({0}), 1)
    kernel_set = KernelSet(A, "cpu", maker.blob(path.read_bytes()), (timed,), 4096)
    with (
        RemoteKernels(worker.endpoints[A], 30) as session,
        pytest.raises(WorkerError, match=f"timing 1 kernels on machine '{A}': .*crashed with SIGSEGV"),
    ):
        session.load(kernel_set, maker.blob_path)
    assert describe(worker.endpoints[A], PATIENCE_SECONDS)


def test_a_crash_at_a_later_micro_batch(maker: ProgramMaker, tmp_path: Path) -> None:
    """No trial can detect this; the error names the stage with more advice than a restart, and no file remains."""
    table, index = maker.input("table", (5, 8)), maker.input("index", (3,), "int64")
    program = maker.program([maker.stage("one", A, [table, index], lambda a, b: [op.take(a, b, axis=0, mode="fast")])])
    rows, far = np.ones((5, 8), np.float32), np.full(3, 1 << 40)
    with LocalWorkers([A], cache=tmp_path / "cache") as workers, open_on(workers, program, maker) as pipe:
        pipe.run([rows, np.zeros(3, np.int64)])
        with pytest.raises(WorkerUnavailableError) as caught:
            pipe.run([rows, far])
        for words in (A, "'one'", "says that it crashed", "compile again for the machine's right target"):
            assert words in str(caught.value)

        def no_pins() -> bool:
            BlobStore(tmp_path / "cache").close()  # as the next worker does
            return not list((tmp_path / "cache" / "pins").iterdir())

        eventually(no_pins, "no pin is left")  # a crashing process may still run
        assert not list((tmp_path / "cache" / "temporary").iterdir())
