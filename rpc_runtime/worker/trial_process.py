"""Child process of a worker that loads and runs libraries, so that a crash does no harm: ``python -m``.

It imports TVM's runtime once and has only one thread, so that it can fork: each trial runs in a child. Requests are
lines of JSON on standard input, one at a time; each is answered by a line on standard output (see `library_trials`).
The process ends when its input ends, or after `IDLE_SECONDS` without a request.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rpc_runtime.program.program import BlobSpec
from rpc_runtime.result_stream import take_stdout
from rpc_runtime.worker.forked_child import end, keep_small
from rpc_runtime.worker.runtime_alone import load_runtime

IDLE_SECONDS = 60.0
"""Idle time after which the process ends: its memory is then worth more than the second that a restart takes."""
PASSED = b"."


def main() -> None:
    answers = take_stdout()  # a library's own output must not mix with answers
    load_runtime()  # once, for all children
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while (line := _read_line(selector)) is not None:
            outcome = _trial(json.loads(line), selector)
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()


def _read_line(selector: selectors.BaseSelector) -> bytes | None:
    """Return the next request; None at the end of the input, or after `IDLE_SECONDS` without one."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        if not selector.select(IDLE_SECONDS):
            return None
        parts.append(os.read(0, 1 << 16))
        if not parts[-1]:
            return None
    return b"".join(parts)


def _trial(request: dict[str, Any], selector: selectors.BaseSelector) -> dict[str, Any]:
    """Try out a library; return {} if it passed, else its ``signal``, its ``exit`` code, or ``late`` (timeout)."""
    from rpc_runtime.execution.blob_store import read_blob
    from rpc_runtime.execution.library import library_file

    content = read_blob(Path(request["path"]), BlobSpec(request["sha256"], request["size_bytes"]))
    with library_file(content) as library:
        for fill in (0, 1):
            outcome = _in_child(request, library, fill, selector)
            # Zero is a valid index everywhere, but not a valid divisor: then try ones.
            if outcome.get("signal") != signal.SIGFPE:
                break
    return outcome


def _in_child(request: dict[str, Any], library: int, fill: int, selector: selectors.BaseSelector) -> dict[str, Any]:
    parent = os.getpid()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _try_out(request, library, fill, send, parent)
    os.close(send)
    passed, late = _wait(receive, request["seconds"], selector, child)
    os.close(receive)
    end(child)
    _, status = os.waitpid(child, 0)
    if passed:
        return {}
    if late:
        return {"late": True}
    code = os.waitstatus_to_exitcode(status)
    return {"signal": -code} if code < 0 else {"exit": code}


def _wait(receive: int, seconds: float, selector: selectors.BaseSelector, child: int) -> tuple[bool, bool]:
    """Wait for the child; return (whether it passed, whether the time was over first)."""
    deadline = time.monotonic() + seconds
    selector.register(receive, selectors.EVENT_READ)
    try:
        while True:
            ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
            if 0 in ready and not os.read(0, 1 << 16):  # the worker has ended
                end(child)
                sys.exit()
            if receive in ready:
                return os.read(receive, 1) == PASSED, False
            if not ready:
                return False, True
    finally:
        selector.unregister(receive)


def _try_out(request: dict[str, Any], library: int, fill: int, send: int, parent: int) -> NoReturn:
    """Run the trial in the child process, then exit."""
    try:
        keep_small(parent)
        # A Python exception is not a crash: the worker will get and report the same one.
        with contextlib.suppress(Exception):
            _load_and_run(request, library, fill)
        gc.collect()  # unloads the library, which runs its code as well
        os.write(send, PASSED)
    finally:
        os._exit(0)


def _load_and_run(request: dict[str, Any], library: int, fill: int) -> None:
    import tvm
    from tvm.runtime.vm import VirtualMachine

    from rpc_runtime.execution.library import load

    module = load(library)
    functions = VirtualMachine(module, tvm.cpu()) if request["is_stage"] else module
    given: dict[tuple[int, str], Any] = {}
    for call in request["calls"]:
        arguments = []
        for position, (shape, dtype, size_bytes) in enumerate(call["arguments"]):
            is_written = position >= len(call["arguments"]) - call["results"]
            # Arguments that are only read may share memory.
            memory = _memory(size_bytes, dtype, 0) if is_written else given.get((size_bytes, dtype))
            if memory is None:
                memory = given[size_bytes, dtype] = _memory(size_bytes, dtype, fill)
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
