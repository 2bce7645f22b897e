"""Kernels are timed in the same way on a worker and in this process; invalid requests are rejected."""

import contextlib
import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import tvm
from tvm import te, tirx

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.execution.kernel_timer import KernelTimer, undisturbed_seconds
from rpc_runtime.program.measurements import KernelSet, KernelTime, TimedKernel, TimingEffort
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B
from tests.helpers.rpc_runtime.timed_kernels import KERNELS, f32

QUICK = TimingEffort(minimum_rounds=3, minimum_seconds=0.0, limit_seconds=30.0)
Session = RemoteKernels | KernelTimer


def product(rows: int, inner: int, columns: int) -> tirx.PrimFunc:
    x = te.placeholder((rows, inner), name="x")
    w = te.placeholder((inner, columns), name="w")
    k = te.reduce_axis((0, inner), name="k")
    return te.create_prim_func([x, w, te.compute((rows, columns), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k))])


def lookup(rows: int, width: int, words: int) -> tirx.PrimFunc:
    table = te.placeholder((rows, width), name="table")
    index = te.placeholder((words,), "int64", name="index")
    return te.create_prim_func([table, index, te.compute((words, width), lambda i, j: table[index[i], j])])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelSet, Callable[[str], Path]]:
    """Return two kernels for machine A, and the path of their library."""
    maker = ProgramMaker(tmp_path_factory.mktemp("kernels"))
    functions = {"product": product(4, 16, 8), "lookup": lookup(5, 8, 3), "long": product(700, 700, 700)}
    module = tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in functions.items()})
    path = maker.folder / "library.so"
    tvm.tirx.build(module, tvm.target.Target("llvm")).export_library(str(path))
    return KernelSet(A, "cpu", maker.blob(path.read_bytes()), KERNELS, 4096), maker.blob_path


@contextmanager
def session_of(kind: str, workers: LocalWorkers) -> Iterator[Session]:
    with KernelTimer(1) if kind == "in process" else RemoteKernels(workers.endpoints[A], 30) as session:
        yield session


def require_times(times: tuple[KernelTime, ...], rounds: int) -> None:
    for time in times:
        assert not time.error
        assert math.isfinite(time.seconds)
        assert time.seconds > 0
        assert time.rounds >= rounds


@pytest.mark.parametrize("kind", ["worker", "in process"])
def test_every_kernel_gets_a_time(kind: str, workers: LocalWorkers, kernels) -> None:
    kernel_set, blob_path = kernels
    with session_of(kind, workers) as session:
        # The ring of weights has the requested size, and at least that of the largest weight.
        assert session.load(kernel_set, blob_path) >= 4096
        times = session.measure(QUICK)
        assert [time.function for time in times] == ["product", "lookup"]
        require_times(times, 3)
        require_times(session.measure(dataclasses.replace(QUICK, minimum_rounds=5)), 5)
        single_kernel = dataclasses.replace(kernel_set, kernels=KERNELS[:1])
        session.load(single_kernel, blob_path)
        assert len(session.measure(QUICK)) == 1


@pytest.mark.parametrize("kind", ["worker", "in process"])
def test_the_limit_ends_the_work(kind: str, workers: LocalWorkers, kernels) -> None:
    kernel_set, blob_path = kernels
    long = TimedKernel("long", (f32(700, 700), f32(700, 700), f32(700, 700)), frozenset({1}), 1)
    with session_of(kind, workers) as session:
        session.load(dataclasses.replace(kernel_set, kernels=(long, *KERNELS)), blob_path)
        times = session.measure(TimingEffort(1000, 0.0, limit_seconds=0.05))
        # The first kernel runs to its end; those after the limit have an error that names it.
        assert [time.rounds for time in times] == [0, 0, 0]
        assert all("limit" in time.error for time in times)


@pytest.mark.parametrize("kind", ["worker", "in process"])
def test_a_kernel_that_fails_leaves_the_others(kind: str, workers: LocalWorkers, kernels) -> None:
    kernel_set, blob_path = kernels
    wrong = TimedKernel("lookup", (f32(5, 8), f32(3), f32(3, 8)), frozenset(), 1)
    missing = TimedKernel("nothing", (f32(1),), frozenset(), 1)
    with session_of(kind, workers) as session:
        session.load(dataclasses.replace(kernel_set, kernels=(KERNELS[0], wrong, missing)), blob_path)
        first, *failed = session.measure(QUICK)
        require_times((first,), 3)
        assert all(time.error and not time.rounds for time in failed)


def test_more_than_the_memory_is_refused(workers: LocalWorkers, kernels) -> None:
    kernel_set, blob_path = kernels
    huge = TimedKernel("x", tuple(f32(1 << 32) for _ in range(400)), frozenset(), 400)
    with RemoteKernels(workers.endpoints[A], 30) as session, pytest.raises(WorkerError, match="GB free"):
        session.load(dataclasses.replace(kernel_set, kernels=(huge,)), blob_path)


def test_a_worker_refuses_kernels_of_another_machine_and_device(workers: LocalWorkers, kernels) -> None:
    kernel_set, blob_path = kernels
    with RemoteKernels(workers.endpoints[A], 30) as session:
        with pytest.raises(WorkerError, match="this worker is 'machine-a'"):
            session.load(dataclasses.replace(kernel_set, machine=B), blob_path)
        with pytest.raises(WorkerError, match="'abacus'"):
            session.load(dataclasses.replace(kernel_set, device="abacus"), blob_path)
        with pytest.raises(WorkerError, match="no kernels are loaded"):
            session.measure(QUICK)


def test_one_timing_at_a_time(workers: LocalWorkers, kernels) -> None:
    kernel_set, blob_path = kernels
    with (
        RemoteKernels(workers.endpoints[A], 30) as first,
        RemoteKernels(workers.endpoints[A], 30) as second,
        ThreadPoolExecutor(1) as thread,
    ):
        first.load(kernel_set, blob_path)
        second.load(kernel_set, blob_path)

        def measure_long() -> tuple[KernelTime, ...]:
            while True:
                with contextlib.suppress(WorkerError):  # the second session may have been first
                    return first.measure(TimingEffort(1, 3.0, 30.0))

        def measure_until(long: Future[tuple[KernelTime, ...]]) -> None:
            while not long.done():
                second.measure(TimingEffort(1, 0.0, 1.0))

        long = thread.submit(measure_long)
        with pytest.raises(WorkerError, match="timing other kernels"):
            measure_until(long)
        require_times(long.result(), 1)


def test_a_worker_that_is_not_there_or_dies_is_named(kernels) -> None:
    kernel_set, blob_path = kernels
    with pytest.raises(WorkerUnavailableError, match="'machine-x'"):
        RemoteKernels(WorkerEndpoint("machine-x", "127.0.0.1:1"), 5)
    with (
        LocalWorkers([A]) as local_workers,
        RemoteKernels(local_workers.endpoints[A], 10) as session,
        ThreadPoolExecutor(1) as thread,
    ):
        session.load(kernel_set, blob_path)
        measuring = thread.submit(session.measure, TimingEffort(1, 20.0, 30.0))
        os.kill(local_workers.process_ids[A], signal.SIGKILL)
        with pytest.raises(WorkerUnavailableError, match="'machine-a'"):
            measuring.result()


SLICE = 4e-3
"""Seconds for which another program uses the core, in every second call."""


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        ([(1e-3, 1e-3)] * 20, 1e-3),
        ([(1e-3, 1e-3), (1e-3 + SLICE, 1e-3)] * 20, 1e-3),  # a short kernel, often interrupted
        ([(14e-3 + 3 * SLICE, 14.2e-3)] * 20, 14.2e-3),  # a long one, always interrupted
        ([(1e-3, 1e-3), (1e-3 + SLICE, 1e-3 + SLICE)] * 20, 1e-3),  # without CPU time, wall-clock time replaces it
        ([(2e-3, 2e-3)], 2e-3),
    ],
)
def test_time_slices_of_other_programs_do_not_count(samples: list[tuple[float, float]], seconds: float) -> None:
    assert undisturbed_seconds(samples) == pytest.approx(seconds)
