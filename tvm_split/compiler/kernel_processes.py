"""Compile kernels in several processes: each gets one kernel after the other from this one, until none is left.

TVM compiles one kernel at a time in one process, since its functions hold Python's lock.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import tvm
from tvm import tirx

from rpc_runtime.hardware import own_cores
from rpc_runtime.processes import module_environment
from tvm_split.compiler.linking import in_memory
from tvm_split.compiler.targets import tvm_target

SECONDS_PER_PROCESS = 2.0
"""Seconds of compiling that are left for each other process that is started: to import TVM takes 0.8 of them."""
MOST_PROCESSES = 8
"""The most processes that compile; each takes 250 MB."""
LEAST_TIMED = 3
"""The kernels that are compiled before the time for the others is estimated by them."""
TIMEOUT_SECONDS = 60.0
"""The longest wait for the last kernels of other processes; kernels take tenths of a second."""


def compiled_objects(
    kernels: Mapping[str, tirx.PrimFunc], target: Mapping[str, Any], deadline: float, on_kernel: Callable[[int], None]
) -> dict[str, bytes]:
    """Return the object file of each kernel; the names are their symbols.

    No kernel but the first is begun after ``deadline`` (seconds of `time.monotonic`). ``on_kernel`` is called with the
    number of finished kernels.
    """
    objects: dict[str, bytes] = {}
    texts: dict[str, bytes] = {}
    waiting = list(kernels)[::-1]
    most = min(own_cores().count, MOST_PROCESSES) - 1
    built_for, begin = tvm_target(target), time.monotonic()

    def names() -> Iterator[str]:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            while not objects or time.monotonic() <= deadline:
                yield waiting.pop()

    def compile_in(process: Connection) -> None:
        for name in names():
            try:
                process.send_bytes(texts[name])
                objects[name] = process.recv_bytes()
            except (OSError, EOFError):  # it has ended
                waiting.append(name)
                return

    def compile_here() -> Iterator[int]:
        """Yield the number of other processes that are worth starting, after each kernel."""
        for name in names():
            on_kernel(len(objects))
            objects[name] = compiled_object(kernels[name], built_for)
            seconds_left = (time.monotonic() - begin) / len(objects) * len(waiting)
            yield min(most, int(seconds_left / SECONDS_PER_PROCESS)) if len(objects) >= LEAST_TIMED else 0

    with ThreadPoolExecutor(MOST_PROCESSES) as threads, contextlib.ExitStack() as processes:
        running: list[Future[None]] = []
        for others in compile_here():
            if others > 0 and not texts:
                texts.update({name: tvm.ir.save_json(kernels[name]).encode() for name in waiting})
                with contextlib.suppress(OSError):  # the system may not have room for them
                    for _ in range(others):
                        process = processes.enter_context(_process(target))
                        running.append(threads.submit(compile_in, process))
        wait(running, TIMEOUT_SECONDS)
    list(compile_here())  # what other processes failed to
    return objects


def compiled_object(kernel: tirx.PrimFunc, target: tvm.target.Target) -> bytes:
    """Return the object file of a scheduled kernel with a global symbol; the kernel does not check its arguments."""
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        module = tvm.tirx.build(tvm.IRModule({"kernel": kernel}), target)
    with in_memory("object") as (file, path):
        module.write_to_file(path, "o")
        return file.read()


@contextlib.contextmanager
def _process(target: Mapping[str, Any]) -> Iterator[Connection]:
    """Yield the connection to a process that answers each kernel with its object; kill it at the end."""
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", "tvm_split.compiler.kernel_process", str(theirs.fileno())]
    process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [*command, json.dumps(dict(target))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=module_environment(),
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
