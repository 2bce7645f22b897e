"""Child process of a worker that loads and runs libraries, so that a crash does no harm: ``python -m``.

It imports TVM's runtime once and has only one thread, so that it can fork: each trial runs in a child. Requests are
lines of JSON on standard input, one at a time; each is answered by a line with an exit code (see `library_trials`). The
process ends when its input ends, or after `IDLE_SECONDS` without a request.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import select
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rpc_runtime.processes import ForkedChild, take_stdout
from rpc_runtime.program.program import BlobSpec
from rpc_runtime.worker.runtime_alone import load_runtime

IDLE_SECONDS = 60.0
"""Idle time after which the process ends: its memory is then worth more than the second that a restart takes."""
PASSED = 113
"""Exit code of a child whose library passed; a library that ends its process uses another one."""


def main() -> None:
    answers = take_stdout()  # a library's own output must not mix with answers
    load_runtime()  # once, for all children
    while select.select([0], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.buffer.readline()):
        print(_trial(json.loads(line)), file=answers, flush=True)


def _trial(request: dict[str, Any]) -> int:
    """Try out a library; return the exit code of the child (negative: a signal, SIGALRM after the timeout)."""
    from rpc_runtime.execution.blob_store import read_blob
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
