"""Build kernels in other processes, and time them in processes of this machine or on a tracker's devices."""

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.support.popen_pool import PopenPoolExecutor, StatusKind, kill_child_processes
from tvm.target import Target

from schedules.blocks import without_symbol
from schedules.traits import threads_of
from schedules.tuning.devices import (
    CPU_EVICTION,
    GPU_EVICTION,
    Connect,
    GpuNeeds,
    Tracker,
    build_into,
    gpu_problem,
    prepare_process,
    probe_of,
    session_at,
    threads_problem,
    timed_in_turn,
)
from schedules.tuning.errors import DeviceError, TuningError

MAIN = "main"
"""The name of the function in a library with one kernel."""
POLL_SECONDS = 0.05
"""Interval between checks whether measurements or processes have ended."""
BUILDS_PER_PROCESS = 50
"""Number of builds after which a process is replaced, because it leaks memory."""
LOOK_SECONDS = 2.0
"""Interval between requests to the tracker for its number of devices."""
NVCC_SECONDS = 120.0
"""The deadline to compile one CUDA kernel, in seconds, on a busy machine; TVM's part takes tenths of a second."""


@dataclass(frozen=True)
class Effort:
    """A measurement's number of rounds, each the median of ``runs`` runs after a warm-up, and its deadlines."""

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


class _Processes(PopenPoolExecutor):  # type: ignore[misc]
    """Processes that block SIGINT and SIGTERM: these signals go to the whole process group and would break a trial."""

    def _worker_run(self, *task: Any) -> Any:
        # A process that starts inherits the mask of the thread that starts it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        return super()._worker_run(*task)

    def end(self) -> None:
        """End the processes at once, even busy ones and those that are just starting.

        TVM's own shutdown would first close the pipe of a busy process, and wait for the lock that its reader holds.
        """
        self._threadpool.shutdown(wait=False, cancel_futures=True)
        while any(thread.is_alive() for thread in self._threadpool._threads):
            for worker in list(self._worker_map.values()):
                if (process := worker._proc) is not None:
                    kill_child_processes(process.pid)  # nvcc runs in its own process group
                    with contextlib.suppress(OSError):
                        process.kill()
            time.sleep(POLL_SECONDS)
        self.shutdown(wait=True)


class Measurer(contextlib.AbstractContextManager["Measurer"]):
    """Builds kernels for a target here and times them on ``tracker``'s devices or on this machine; a context manager.

    Libraries and other temporary files are in ``folder``. ``linker`` is a command that links for another architecture;
    with None this machine's compiler links. ``gpu`` is required for a CUDA target: it says how machine code is made and
    what the devices must have. ``build_processes`` is the number of kernels that are compiled at the same time.

    Raises:
        DeviceError: no device answers, or a device does not have the required GPU.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        tracker: Tracker | None = None,
        effort: Effort | None = None,
        linker: Sequence[str] | None = None,
        gpu: GpuNeeds | None = None,
        build_processes: int = 1,
    ) -> None:
        self.target = target
        self.effort = effort or (Effort() if gpu is None else Effort(build_timeout_seconds=NVCC_SECONDS))
        self._gpu, self._tracker = gpu, tracker
        self._build_one = build_into(tuple(linker) if linker else None, None if gpu is None else gpu.code)
        self._connect: Connect | None = None
        if tracker is not None:
            of_threads = threads_problem(threads_of(target))
            self._connect = session_at(tracker, of_threads if gpu is None else gpu_problem(gpu))
        self._ended = False
        self.devices = tracker.wait_for_devices() if tracker is not None else 1
        # One measurement waits for at most one other, and for its device to register again.
        run_seconds = self.effort.run_timeout_seconds if tracker is None else 2 * tracker.session_timeout_seconds + 10.0
        prepare = prepare_process(threads_of(target), str(folder))
        # MetaSchedule's builder starts new processes for every batch, because they leak. This takes seconds, so these
        # processes are replaced less often.
        self._builders = _Processes(
            build_processes,
            self.effort.build_timeout_seconds,
            prepare,
            maximum_process_uses=BUILDS_PER_PROCESS,
            stderr=DEVNULL,
        )
        self._runners = _Processes(self.devices, run_seconds, prepare, stderr=DEVNULL)
        for _ in range(self.devices):  # these start while the builders start and build: each imports TVM, for seconds
            self._runners.submit(probe_of(None))
        try:
            if tracker is not None and gpu is not None:
                self._require_gpus(tracker)
        except BaseException:
            self.close()
            raise

    @property
    def is_remote(self) -> bool:
        return self._tracker is not None

    def build(self, candidates: Sequence[Mapping[str, tirx.PrimFunc]]) -> list[Built]:
        """Build one library per candidate, which maps names to functions; this machine's cores build all at once."""
        tasks = []
        for candidate in candidates:
            kernels = {name: without_symbol(kernel) for name, kernel in candidate.items()}
            named = {name: kernel.with_attr("global_symbol", name) for name, kernel in kernels.items()}
            tasks.append((tvm.IRModule(named), self.target))
        results = list(self._builders.map_with_error_catching(self._build_one, tasks))
        self._require_open()
        return [
            Built(str(result.value), None)
            if result.status == StatusKind.COMPLETE
            else Built(None, str(result.value) or f"not built within {self.effort.build_timeout_seconds} seconds")
            for result in results
        ]

    def start(
        self, built: Sequence[Built], function: tirx.PrimFunc, names: tuple[str, ...] = (MAIN,), rounds: int = 0
    ) -> list[Future[Any] | None]:
        """Start to time libraries that take the arguments of ``function``; `finish` waits for the returned values.

        Remote devices measure all of them at once, this machine one after the other.
        """
        arguments = [
            (tuple(map(int, info.shape)), str(info.dtype)) for info in ArgInfo.from_prim_func(without_symbol(function))
        ]
        kind, eviction = ("cpu", CPU_EVICTION) if self._gpu is None else ("cuda", GPU_EVICTION)
        rounds = rounds or self.effort.rounds
        seconds = self.effort.run_timeout_seconds / 2  # the other half is for loading and filling
        measure = timed_in_turn(self._connect, arguments, names, rounds, self.effort.runs, kind, eviction, seconds)
        return [
            None if candidate.path is None else self._runners.submit(measure, candidate.path) for candidate in built
        ]

    def finish(
        self, started: Sequence[Future[Any] | None], built: Sequence[Built], function: tirx.PrimFunc
    ) -> list[Timing]:
        """Return the timings that `start` began; remote failures are tried once more, if possible on another device.

        Raises:
            DeviceError: none succeeded and no device answers, or a device has another number of threads or another GPU.
        """
        timings = self._timings(started, built)
        again = [i for i, timing in enumerate(timings) if timing.rounds is None and built[i].path is not None]
        if self._tracker is None or not again:
            return timings
        # A device may have died, so check the devices before blaming a kernel.
        self.devices = self._tracker.wait_for_devices()
        candidates = [built[i] for i in again]
        for i, timing in zip(again, self._timings(self.start(candidates, function), candidates), strict=True):
            timings[i] = timing
        if all(timing.rounds is None for timing in timings):
            self._require_answer(self._tracker, timings[again[0]].error)
        return timings

    def duel(
        self, contenders: Sequence[tirx.PrimFunc], function: tirx.PrimFunc, rounds: int
    ) -> list[tuple[float, ...]] | None:
        """Return each contender's seconds per round, in which all run in turn on one device; None if it fails twice."""
        names = tuple(f"contender_{number}" for number in range(len(contenders)))
        built = self.build([dict(zip(names, contenders, strict=True))])
        try:
            for _ in range(2):
                (timing,) = self._timings(self.start(built, function, names, rounds), built)
                if timing.rounds is not None:
                    return [timing.rounds[number :: len(names)] for number in range(len(names))]
            return None
        finally:
            self.discard(built)

    def discard(self, built: Sequence[Built]) -> None:
        """Remove libraries that are no longer needed."""
        for candidate in built:
            if candidate.path is not None:
                Path(candidate.path).unlink(missing_ok=True)

    def close(self) -> None:
        """End the processes that build and measure, at once; may be called again, and by another thread."""
        self._ended = True
        self._builders.end()
        self._runners.end()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        """Raise `TuningError` after `close`, so that trials that were interrupted do not count as failed."""
        if self._ended:
            raise TuningError("the measurements were ended")

    def _require_gpus(self, tracker: Tracker) -> None:
        """Raise `DeviceError` if a registered device does not have the needed GPU; all are asked at the same time."""
        probes = [self._runners.submit(probe_of(self._connect)) for _ in range(self.devices)]
        for probe in probes:
            if probe.exception() is None and probe.result():  # a device without an answer shows when it measures
                raise tracker.misfit(probe.result())

    def _timings(self, started: Sequence[Future[Any] | None], built: Sequence[Built]) -> list[Timing]:
        """Wait for measurements; raise `DeviceError` if no device has been registered for too long."""
        missing_since: float | None = None
        looked = time.monotonic()
        while self._tracker is not None and not all(future is None or future.done() for future in started):
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
        return [self._timing(future, candidate) for future, candidate in zip(started, built, strict=True)]

    def _timing(self, future: Future[Any] | None, built: Built) -> Timing:
        if future is None:
            return Timing(None, built.error)
        try:
            result = future.result()
        except TimeoutError:
            return Timing(None, "it was not measured within its time limit")
        except Exception as error:
            self._require_open()
            return Timing(None, str(error) or type(error).__name__)
        if self._tracker is not None and isinstance(result, str):
            raise self._tracker.misfit(result)
        return Timing(tuple(result), None)

    def _require_answer(self, tracker: Tracker, reason: str | None) -> None:
        """Raise `DeviceError` if no registered device answers; otherwise the kernels caused the failures."""
        try:
            problem = self._runners.submit(probe_of(self._connect)).result()
        except Exception as error:
            raise tracker.no_answer(reason or str(error)) from error
        if problem:
            raise tracker.misfit(problem)
