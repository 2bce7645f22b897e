"""Build kernels in separate processes and time them with MetaSchedule's runners, with deadlines."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule
from tvm.support.popen_pool import PopenPoolExecutor, StatusKind, kill_child_processes
from tvm.target import Target

from schedules.blocks import without_symbol
from schedules.traits import threads_of
from schedules.tuning.devices import (
    CPU_EVICTION,
    GPU_EVICTION,
    GpuNeeds,
    Tracker,
    build_into,
    connects,
    evaluate_in_turn,
    gpu_problem,
    misfit_in,
    prepare_process,
    session_of,
    threads_problem,
)
from schedules.tuning.errors import DeviceError

MAIN = "main"
POLL_SECONDS = 0.05
BUILDS_PER_PROCESS = 50
LOOK_SECONDS = 2.0
NVCC_SECONDS = 120.0
"""The deadline to compile one CUDA kernel, in seconds, on a busy machine; TVM's part takes tenths of a second."""


@dataclass(frozen=True)
class Effort:
    """The number of runs per measurement: ``rounds`` times the median of ``runs``, after one warm-up each."""

    rounds: int = 3
    runs: int = 10
    build_timeout_seconds: float = 15.0
    run_timeout_seconds: float = 20.0


@dataclass(frozen=True)
class Built:
    """A kernel's library, or the error if it could not be built."""

    path: str | None
    error: str | None


@dataclass(frozen=True)
class Timing:
    """The seconds of each round, or the error if there are none."""

    rounds: tuple[float, ...] | None
    error: str | None


class Measurer:
    """Builds kernels for a target here and times them on ``tracker``'s devices or on this machine; a context manager.

    ``linker`` is a command that links for another architecture; with None this machine's compiler links. ``gpu`` is
    required for a CUDA target: it says how machine code is made and what the devices must have. ``build_processes`` is
    the number of kernels that are compiled at the same time.

    Raises:
        DeviceError: no device answers, or a device does not have the required GPU.
    """

    def __init__(
        self,
        target: Target,
        tracker: Tracker | None = None,
        effort: Effort | None = None,
        linker: Sequence[str] | None = None,
        gpu: GpuNeeds | None = None,
        build_processes: int = 1,
    ) -> None:
        self.target = target
        self.effort = effort or (Effort() if gpu is None else Effort(build_timeout_seconds=NVCC_SECONDS))
        self._gpu = gpu
        self._tracker = tracker
        self._threads = threads_of(target)
        self.devices = tracker.wait_for_devices() if tracker is not None else 1
        self._folder = tempfile.TemporaryDirectory(prefix="tvm-split-tuning-")
        self._linker = tuple(linker) if linker else None
        self._runner: Any = None
        # MetaSchedule's LocalBuilder starts new processes for every batch, because they leak. That takes seconds, while
        # building takes tenths. These processes are replaced only now and then.
        self._builders: Any = PopenPoolExecutor(
            max_workers=build_processes,
            timeout=self.effort.build_timeout_seconds,
            initializer=prepare_process(self._threads),
            maximum_process_uses=BUILDS_PER_PROCESS,
        )
        try:
            self._runner = self._new_runner()
            if tracker is not None and gpu is not None:
                self._require_gpus(tracker, gpu)
        except BaseException:
            self.close()
            raise

    @property
    def is_remote(self) -> bool:
        return self._tracker is not None

    def build(self, candidates: Sequence[Mapping[str, tirx.PrimFunc]]) -> list[Built]:
        """Build one library per candidate, which maps names to functions; this machine's cores build all at once."""
        if not candidates:
            return []
        modules = [
            tvm.IRModule(
                {
                    name: without_symbol(function).with_attr("global_symbol", name)
                    for name, function in candidate.items()
                }
            )
            for candidate in candidates
        ]
        compile_one = build_into(self._folder.name, self._linker, None if self._gpu is None else self._gpu.code)
        tasks = [(module, self.target) for module in modules]
        return [
            Built(str(result.value), None)
            if result.status == StatusKind.COMPLETE
            else Built(None, str(result.value) or f"not built within {self.effort.build_timeout_seconds} seconds")
            for result in self._builders.map_with_error_catching(compile_one, tasks)
        ]

    def start(
        self, built: Sequence[Built], function: tirx.PrimFunc, names: tuple[str, ...] = (MAIN,), rounds: int = 0
    ) -> list[Any]:
        """Start to time libraries that take the arguments of ``function``; `finish` waits for the returned values.

        Remote devices measure all of them at once. This machine measures one after the other before this returns.
        """
        arguments = meta_schedule.arg_info.ArgInfo.from_prim_func(without_symbol(function))
        eviction = CPU_EVICTION if self._gpu is None else GPU_EVICTION
        self._runner.f_run_evaluator = evaluate_in_turn(names, rounds or self.effort.rounds, self.effort.runs, eviction)
        kind = "cpu" if self._gpu is None else "cuda"
        return [
            self._runner.run([meta_schedule.runner.RunnerInput(candidate.path, kind, arguments)])[0]
            if candidate.path is not None
            else None
            for candidate in built
        ]

    def finish(self, started: Sequence[Any], built: Sequence[Built], function: tirx.PrimFunc) -> list[Timing]:
        """The timings that `start` began; a remote one that fails is tried once more, on another device if possible.

        Raises:
            DeviceError: none succeeded and no device answers, or a device has another number of threads or another GPU.
        """
        self._wait(started)
        timings = [self._timing(future, candidate) for future, candidate in zip(started, built, strict=True)]
        again = [i for i, timing in enumerate(timings) if timing.rounds is None and built[i].path is not None]
        if self._tracker is None or not again:
            return timings
        # A device may have died, so check the devices before blaming a kernel.
        self.devices = self._tracker.wait_for_devices()
        futures = self.start([built[i] for i in again], function)
        self._wait(futures)
        for i, future in zip(again, futures, strict=True):
            timings[i] = self._timing(future, built[i])
        if all(timing.rounds is None for timing in timings):
            self._require_answer(self._tracker, timings[again[0]].error)
        return timings

    def duel(
        self, contenders: Sequence[tirx.PrimFunc], function: tirx.PrimFunc, rounds: int
    ) -> list[tuple[float, ...]] | None:
        """Each contender's seconds, in rounds in which all run in turn on one device; None if the duel failed."""
        names = tuple(f"contender_{number}" for number in range(len(contenders)))
        built = self.build([dict(zip(names, contenders, strict=True))])
        try:
            for _ in range(2):
                started = self.start(built, function, names, rounds)
                self._wait(started)
                timing = self._timing(started[0], built[0])
                if timing.rounds is not None:
                    return [timing.rounds[number :: len(names)] for number in range(len(names))]
            return None
        finally:
            self.discard(built)

    def discard(self, built: Sequence[Built]) -> None:
        """Remove libraries that are no longer needed."""
        for candidate in built:
            if candidate.path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(candidate.path)  # noqa: PTH108

    def close(self) -> None:
        """End the processes that build and measure; may be called again."""
        if self._builders is not None:
            _end(self._builders)
            self._builders = None
        if self._runner is not None:
            _end(self._runner.pool)
            self._runner = None
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_runner(self) -> Any:
        prepare = prepare_process(self._threads)
        if self._tracker is None:
            return meta_schedule.runner.LocalRunner(timeout_sec=self.effort.run_timeout_seconds, initializer=prepare)
        runner = meta_schedule.runner.RPCRunner(
            self._tracker.configuration,
            max_workers=self.devices,
            f_create_session=self._connect(),
            initializer=prepare,
        )
        # MetaSchedule gives this pool no deadline, so it would wait forever for a device that is switched off. One
        # measurement waits for at most one other, and for its server to register again.
        runner.pool._timeout = 2.0 * self._tracker.session_timeout_seconds + 10.0
        return runner

    def _connect(self) -> Callable[[Any], Any]:
        gpu = self._gpu
        return session_of(
            threads_problem(self._threads) if gpu is None else gpu_problem(gpu.arch, gpu.driver, gpu.is_source)
        )

    def _require_gpus(self, tracker: Tracker, gpu: GpuNeeds) -> None:
        """Ask every registered device once for its GPU, all at the same time, before anything is built."""
        probe = connects(self._connect())
        futures = [self._runner.pool.submit(probe, tracker.configuration) for _ in range(self.devices)]
        for future in futures:
            try:
                future.result()
            except Exception as error:
                self._refuse(str(error))

    def _refuse(self, error: str) -> None:
        """Raise a `DeviceError` if a device's error reports a wrong thread count or GPU; ignore other errors."""
        if self._tracker is not None and misfit_in(error):
            raise self._tracker.misfit(misfit_in(error))

    def _wait(self, futures: Sequence[Any]) -> None:
        """Wait until all are done; raise `DeviceError` if no device has been registered for too long."""
        missing_since: float | None = None
        looked = time.monotonic()
        while self._tracker is not None and not all(future is None or future.done() for future in futures):
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - looked < LOOK_SECONDS:
                continue
            looked = now
            try:
                self.devices = self._tracker.count_devices()
                missing_since = None
            except DeviceError:
                missing_since = missing_since or now
                if now - missing_since > self._tracker.device_timeout_seconds:
                    raise

    def _require_answer(self, tracker: Tracker, reason: str | None) -> None:
        """After failures, raise if no registered device answers; otherwise the kernels are the cause."""
        try:
            self._runner.pool.submit(connects(self._connect()), tracker.configuration).result()
        except Exception as error:
            self._refuse(str(error))
            raise tracker.no_answer(reason or str(error)) from error

    def _timing(self, future: Any, built: Built) -> Timing:
        if future is None:
            return Timing(None, built.error)
        result = future.result()
        if result.run_secs is not None:
            return Timing(tuple(float(seconds) for seconds in result.run_secs), None)
        error = str(result.error_msg or "no reason given")
        self._refuse(error)
        return Timing(None, error)


def _end(pool: Any) -> None:
    """End a pool's processes at once, even busy ones.

    The pool's own shutdown would first close the pipe of a busy process, and wait for the lock that its reader holds.
    """
    pool._threadpool.shutdown(wait=False, cancel_futures=True)
    for worker in list(pool._worker_map.values()):
        process = worker._proc
        if process is not None:
            kill_child_processes(process.pid)  # nvcc runs in its own process group
            with contextlib.suppress(OSError):
                process.kill()
    pool._threadpool.shutdown(wait=True)
    pool.shutdown(wait=True)
