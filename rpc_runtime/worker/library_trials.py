"""Runs new libraries first in another process, so that a crash does not end the worker.

That process runs `main` of this module. It imports TVM's runtime once and has only one thread, so that it can fork:
each trial runs in a child. Requests are lines of JSON on standard input, one at a time; each is answered by a line with
an exit code. The process ends when its input ends, or after `IDLE_SECONDS` without a request while the worker has no
deployment: one that recovers from a failure should not wait for its start.
"""

import contextlib
import gc
import hashlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.blob_store import BlobStore, read_blob
from rpc_runtime.processes import ForkedChild, end_child, start_child, take_stdout
from rpc_runtime.program.measurements import KernelSet
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec
from rpc_runtime.worker.runtime_alone import load_runtime

DEFAULT_SECONDS = 60.0
END_SECONDS = 2.0
CALLER_CHECK_SECONDS = 0.5
"""Time between two checks, during a trial, that the caller still waits."""
IDLE_SECONDS = 60.0
"""Idle time after which the process ends: its memory is then worth more than the second that a restart takes."""
PASSED = 113
"""Exit code of a child whose library passed; a library that ends its process uses another one."""
_IN_TRIAL = "when it was tried out (loaded, and run once on zeros, in a process of its own)"
_CORRECT_TARGET = (
    "Give the machine its right target in the cluster's description, or leave its target out, and compile again"
)


class LibraryTrials:
    """Tries out libraries before their worker loads them: each is loaded and, for a CPU, run once on zeros.

    The result is remembered by the library's digest and arguments. So a library that passed costs nothing again, and
    one that crashed stays rejected, although it might pass by chance. Libraries for a GPU are only loaded, because
    running programs may fill the device's memory. Thread-safe; one trial at a time.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._problems: dict[str, str] = {}  # empty text: the library passed
        self._closed = False
        self._kept = os.memfd_create("kept")
        """A file that the process has too; its only byte says whether the process is kept."""
        self.keep(False)

    def keep(self, is_kept: bool) -> None:
        """Say whether the process stays while it is idle."""
        os.pwrite(self._kept, bytes([is_kept]), 0)

    def prepare(self) -> None:
        """Start the process that tries out libraries, so that the first trial does not wait for it."""
        with self._lock, contextlib.suppress(OSError):  # the first trial reports the error
            self._started()

    def stage(self, stage: StageSpec, deadline: float, caller_waits: Callable[[], bool]) -> None:
        """Try out a stage's library.

        Args:
            deadline: when the caller stops waiting, in seconds of `time.monotonic`; half of the remaining time is used.
            caller_waits: returns whether the caller still waits; the trial is stopped otherwise.

        Raises:
            WorkerError: the library crashed, or did not end in time; the message names stage and machine.
        """
        arguments = [*stage.inputs, *(weight.tensor for weight in stage.weights)]
        calls = [_call("main", arguments)] if stage.device == "cpu" else []
        what = f"stage {stage.name!r} on machine {stage.machine!r}{_compiled_for(stage.target)}"
        self._try(what, stage.library, {"is_stage": bool(calls), "calls": calls}, deadline, caller_waits)

    def kernels(self, kernels: KernelSet, deadline: float, caller_waits: Callable[[], bool]) -> None:
        """Try out the library of kernels to be timed; arguments and errors as for `stage`."""
        on_cpu = kernels.device == "cpu"
        calls = [_call(kernel.function, kernel.arguments, kernel.results) for kernel in kernels.kernels if on_cpu]
        what = f"timing {len(kernels.kernels)} kernels on machine {kernels.machine!r}{_compiled_for(kernels.target)}"
        self._try(what, kernels.library, {"is_stage": False, "calls": calls}, deadline, caller_waits)

    def close(self) -> None:
        """End the process that tries out libraries; a running trial ends with its input. Idempotent."""
        self._closed = True
        if self._process is not None:
            end_child(self._process, END_SECONDS)

    def _try(
        self, what: str, library: BlobSpec, use: dict[str, Any], deadline: float, caller_waits: Callable[[], bool]
    ) -> None:
        request = {**use, "sha256": library.sha256}
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        problem = self._problems.get(digest)
        if problem is None:
            if not self._lock.acquire(timeout=max(0.0, _half(deadline))):
                raise WorkerError(f"{what}: the worker is still trying out other libraries: deploy again later")
            try:
                seconds = max(1.0, _half(deadline))
                request |= {"path": str(self._blobs.path(library)), "size_bytes": library.size_bytes}
                code = self._ask({**request, "seconds": seconds}, caller_waits)
            finally:
                self._lock.release()
            problem = _problem(code, seconds)
            if code not in (-signal.SIGALRM, -signal.SIGKILL):  # these may not be the library's fault
                self._problems[digest] = problem
        if problem:
            raise WorkerError(f"{what}: the library {problem}")

    def _ask(self, request: dict[str, Any], caller_waits: Callable[[], bool]) -> int:
        """Return the exit code of a trial. Retry once, because an idle trial process may end just when it is asked."""
        for _ in range(2):
            process = self._started()
            requests: IO[bytes] = process.stdin  # type: ignore[assignment]
            answers: IO[bytes] = process.stdout  # type: ignore[assignment]
            with contextlib.suppress(OSError, ValueError):  # it has ended
                requests.write(json.dumps(request).encode() + b"\n")
                requests.flush()
                while not wait([answers.fileno()], CALLER_CHECK_SECONDS) and caller_waits():
                    pass
                if caller_waits() and (answer := answers.readline()):
                    return int(answer)
            end_child(process, END_SECONDS)
            if not caller_waits():
                raise WorkerError("the caller stopped waiting for the trial of a library")
        raise WorkerError("the process that tries out libraries ended; the worker's own output may say why")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise WorkerError("this worker is ending")
        if self._process is None or self._process.poll() is not None:
            self._process = start_child("worker.library_trials", str(self._kept), pass_fds=(self._kept,))
        return self._process


def _compiled_for(target: str) -> str:
    return f", compiled for {target}" if target else ""


def _half(deadline: float) -> float:
    return (deadline - time.monotonic()) / 2


def _call(function: str, arguments: Sequence[TensorSpec], results: int = 0) -> dict[str, Any]:
    """Return a call as JSON: the function, its arguments, and how many of the last arguments are results."""
    specs = [(list(tensor.shape), tensor.dtype, tensor.size_bytes) for tensor in arguments]
    return {"function": function, "arguments": specs, "results": results}


def _problem(code: int, seconds: float) -> str:
    """Return what an exit code says, as the end of a sentence about the library; empty if the library passed."""
    if code == PASSED:
        return ""
    if code >= 0:
        return f"ended its process with exit code {code} {_IN_TRIAL}: it is damaged. Compile again"
    number = -code
    if number == signal.SIGALRM:
        return f"did not finish within {seconds:.0f} s {_IN_TRIAL}. If it is only slow, deploy with a longer timeout"
    if number == signal.SIGILL:
        return (
            f"crashed with SIGILL {_IN_TRIAL}: it was compiled for a processor that has more instructions than this "
            f"one. {_CORRECT_TARGET}"
        )
    if number == signal.SIGKILL:
        return f"was killed {_IN_TRIAL}, which is what systems do when memory runs out. Move layers to another machine"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"crashed with {name} {_IN_TRIAL}: it is damaged, or not for this machine. {_CORRECT_TARGET}"


def main() -> None:
    answers = take_stdout()  # a library's own output must not mix with answers
    load_runtime()  # once, for all children
    kept = int(sys.argv[1])
    while (is_asked := select.select([0], [], [], IDLE_SECONDS)[0]) or any(os.pread(kept, 1, 0)):
        if is_asked:
            if not (line := sys.stdin.buffer.readline()):
                return
            print(_trial(json.loads(line)), file=answers, flush=True)


def _trial(request: dict[str, Any]) -> int:
    """Try out a library; return the exit code of the child (negative: a signal, SIGALRM after the timeout)."""
    from rpc_runtime.execution.loaded_stage import library_file

    content = read_blob(Path(request["path"]), BlobSpec(request["sha256"], request["size_bytes"]))
    with library_file(content) as library:
        code = _in_child(request, library, fill=0)
        # Zero is a valid index everywhere, but not a valid divisor: then try ones.
        return _in_child(request, library, fill=1) if code == -signal.SIGFPE else code


def _in_child(request: dict[str, Any], library: int, fill: int) -> int:
    child = ForkedChild(partial(_try_out, request, library, fill), request["seconds"])
    ready, _, _ = select.select([0, child.ended], [], [])
    code = child.end()
    if 0 in ready:  # the worker has ended, or waits no longer
        sys.exit()
    return code


def _try_out(request: dict[str, Any], library: int, fill: int) -> int:
    # A Python exception is not a crash: the worker will get and report the same one.
    with contextlib.suppress(Exception):
        _load_and_run(request, library, fill)
    gc.collect()  # unloads the library, which runs its code as well
    return PASSED


def _load_and_run(request: dict[str, Any], library: int, fill: int) -> None:
    import tvm
    from tvm.runtime.vm import VirtualMachine

    from rpc_runtime.execution.loaded_stage import load

    module = load(library)
    functions = VirtualMachine(module, tvm.cpu()) if request["is_stage"] else module
    shared: dict[tuple[int, str], Any] = {}
    for call in request["calls"]:
        arguments = []
        for position, (shape, dtype, size_bytes) in enumerate(call["arguments"]):
            is_written = position >= len(call["arguments"]) - call["results"]
            # Arguments that are only read may share memory.
            memory = _memory(size_bytes, dtype, 0) if is_written else shared.get((size_bytes, dtype))
            if memory is None:
                memory = shared[size_bytes, dtype] = _memory(size_bytes, dtype, fill)
            arguments.append(memory._create_view(shape, dtype))
        functions[call["function"]](*arguments)


def _memory(size_bytes: int, dtype: str, fill: int) -> Any:
    """Return a tensor of zeros, which takes no memory until it is written to; integers are set to ``fill``."""
    import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
    import numpy as np
    import tvm

    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1), flags=private), np.uint8)
    if fill and size_bytes and np.dtype(dtype).kind in "iu":
        memory.view(dtype)[:] = fill
    return tvm.runtime.from_dlpack(memory)


if __name__ == "__main__":
    main()
