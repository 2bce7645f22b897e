"""Runs new libraries first in another process, so that a crash does not end the worker."""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.processes import module_command, module_environment
from rpc_runtime.program.kernel_times import KernelSet
from rpc_runtime.program.program import BlobSpec, StageSpec, TensorSpec

DEFAULT_SECONDS = 60.0
END_SECONDS = 2.0
LOOK_SECONDS = 0.5
MOST_REMEMBERED = 10_000
_HOW = "when it was tried out (loaded, and run once on zeros, in a process of its own)"
_AGAIN = "Give the machine its right target in the cluster's description, or leave its target out, and compile again"


class LibraryTrials:
    """Tries out libraries before their worker loads them: each is loaded and, for a CPU, run once on zeros.

    The result is remembered by the library's digest and arguments. So a library that passed costs nothing again, and
    one that crashed stays rejected, although it might pass by chance. Libraries for a GPU are only loaded, because
    running programs may fill the device's memory. Thread-safe; one trial at a time.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None
        self._problems: dict[str, str] = {}  # empty text: the library passed
        self._closed = False

    def prepare(self) -> None:
        """Start the process that tries out libraries, so that the first trial does not wait for it."""
        if not self._lock.acquire(blocking=False):
            return  # a trial is running, so the process is started already
        try:
            with contextlib.suppress(WorkerError):  # the first trial reports the error
                if self._process is None and not self._closed:
                    self._process = _TrialProcess()
        finally:
            self._lock.release()

    def stage(self, stage: StageSpec, deadline: float, is_wanted: Callable[[], bool]) -> None:
        """Try out a stage's library.

        Args:
            deadline: when the caller stops waiting, in seconds of `time.monotonic`; half of the remaining time is used.
            is_wanted: returns whether the caller still waits; the trial is stopped otherwise.

        Raises:
            WorkerError: the library crashed, or did not end in time; the message names stage and machine.
        """
        arguments = [*stage.inputs, *(weight.tensor for weight in stage.weights)]
        calls = [_call("main", arguments)] if stage.device == "cpu" else []
        what = f"stage {stage.name!r} on machine {stage.machine!r}{_compiled_for(stage.target)}"
        self._try(what, stage.library, True, calls, deadline, is_wanted)

    def kernels(self, kernels: KernelSet, deadline: float, is_wanted: Callable[[], bool]) -> None:
        """Try out the library of kernels to be timed; arguments and errors as for `stage`."""
        on_cpu = kernels.device == "cpu"
        calls = [_call(each.function, each.arguments, each.results) for each in kernels.kernels if on_cpu]
        what = f"timing {len(kernels.kernels)} kernels on machine {kernels.machine!r}{_compiled_for(kernels.target)}"
        self._try(what, kernels.library, False, calls, deadline, is_wanted)

    def close(self) -> None:
        """End the process that tries out libraries. Idempotent."""
        self._closed = True
        is_idle = self._lock.acquire(blocking=False)
        try:
            if self._process is not None:
                self._process.close(is_idle=is_idle)
        finally:
            if is_idle:
                self._lock.release()

    def _try(
        self,
        what: str,
        library: BlobSpec,
        is_stage: bool,
        calls: Sequence[dict[str, Any]],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> None:
        tried = {"sha256": library.sha256, "is_stage": is_stage and bool(calls), "calls": calls}
        digest = hashlib.sha256(json.dumps(tried).encode()).hexdigest()
        problem = self._problems.get(digest)
        if problem is None:
            problem = self._problem(tried, library, what, digest, deadline, is_wanted)
        if problem:
            raise WorkerError(f"{what}: the library {problem}")

    def _problem(
        self,
        tried: dict[str, Any],
        library: BlobSpec,
        what: str,
        digest: str,
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> str:
        if not self._lock.acquire(timeout=max(0.0, _half(deadline))):
            raise WorkerError(f"{what}: the worker is still trying out other libraries: deploy again later")
        try:
            seconds = max(1.0, _half(deadline))
            place = {"path": str(self._blobs.path(library)), "size_bytes": library.size_bytes}
            outcome = self._ask({**tried, **place, "seconds": seconds}, is_wanted)
        finally:
            self._lock.release()
        problem = _words(outcome, seconds)
        if not outcome.get("late") and outcome.get("signal") != signal.SIGKILL:  # these may not be the library's fault
            if len(self._problems) >= MOST_REMEMBERED:
                self._problems.clear()
            self._problems[digest] = problem
        return problem

    def _ask(self, request: dict[str, Any], is_wanted: Callable[[], bool]) -> dict[str, Any]:
        """Return the outcome of a trial. Retry once, because an idle trial process may end just when it is asked."""
        line = json.dumps(request).encode() + b"\n"
        for _ in range(2):
            if self._closed:
                raise WorkerError("this worker is ending")
            if self._process is None:
                self._process = _TrialProcess()
            answer = self._process.ask(line, is_wanted)
            if answer:
                return dict(json.loads(answer))
            self._process.close()
            self._process = None
            if not is_wanted():
                raise WorkerError("nobody waits any more for a library to be tried out")
        raise WorkerError("the process that tries out libraries ended; the worker's own output may say why")


class _TrialProcess:
    """A running `rpc_runtime.worker.trial_process`."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as where_it_fails:
            try:
                # The process ends when this connection closes, however the worker ends.
                self._socket, other = socket.socketpair()
                where_it_fails.enter_context(self._socket)
                with other:
                    self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                        module_command("worker.trial_process"),
                        stdin=other.fileno(),
                        stdout=other.fileno(),
                        # One thread only: a second one (of numpy's BLAS) could hold a lock that a fork waits for.
                        env=module_environment(OPENBLAS_NUM_THREADS="1"),
                        start_new_session=True,
                    )
            except OSError as error:
                raise WorkerError(f"cannot start a process to try out libraries: {error}") from error
            where_it_fails.pop_all()
        self._answers = self._socket.makefile("rb")

    def ask(self, line: bytes, is_wanted: Callable[[], bool]) -> bytes:
        """Return the answer to a request; empty if the process has ended, or ``is_wanted()`` is False."""
        try:
            self._socket.sendall(line)
            while not select.select([self._socket], [], [], LOOK_SECONDS)[0]:
                if not is_wanted():
                    return b""
            return self._answers.readline()
        except OSError:
            return b""

    def close(self, *, is_idle: bool = False) -> None:
        """End the process, which first ends its trial; kill it at once if it is idle."""
        if is_idle:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._socket.close()


def _compiled_for(target: str) -> str:
    return f", compiled for {target}" if target else ""


def _half(deadline: float) -> float:
    return (deadline - time.monotonic()) / 2


def _call(function: str, arguments: Sequence[TensorSpec], results: int = 0) -> dict[str, Any]:
    """Describe a call: the function, its arguments, and how many of the last arguments are results."""
    specs = [(list(each.shape), each.dtype, each.size_bytes) for each in arguments]
    return {"function": function, "arguments": specs, "results": results}


def _words(outcome: dict[str, Any], seconds: float) -> str:
    """Describe the outcome of a trial as the end of a sentence about the library; empty if it passed."""
    if outcome.get("late"):
        return f"did not come to an end within {seconds:.0f} s {_HOW}. If it only is slow, deploy with a longer timeout"
    if "exit" in outcome:
        return f"ended its process with exit code {outcome['exit']} {_HOW}: it is damaged. Compile again"
    if "signal" not in outcome:
        return ""
    number = int(outcome["signal"])
    if number == signal.SIGILL:
        return (
            f"crashed with SIGILL {_HOW}: it was compiled for a processor that has more instructions than this one. "
            f"{_AGAIN}"
        )
    if number == signal.SIGKILL:
        return f"was killed {_HOW}, which is what systems do when memory runs out. Move layers to another machine"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"crashed with {name} {_HOW}: it is damaged, or not for this machine. {_AGAIN}"
