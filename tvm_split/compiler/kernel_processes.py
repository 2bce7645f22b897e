"""Compile kernels in several processes: each takes one kernel after the other from a folder, until none is left.

TVM compiles one kernel at a time in one process, since its functions hold Python's lock. The folder has a file per
kernel (``NUMBER.waiting``), which a process renames (``NUMBER.taken``) before it compiles it (to ``NUMBER.o``).
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from rpc_runtime.files import replacing
from rpc_runtime.hardware import own_cores
from rpc_runtime.processes import module_environment
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.linking import in_memory
from tvm_split.compiler.targets import tvm_target

SECONDS_PER_PROCESS = 2.0
"""Seconds of compiling that are left for each other process that is started: to import TVM takes 0.8 of them."""
MOST_PROCESSES = 8
"""The most processes that compile; each takes 250 MB."""
LEAST_TIMED = 3
"""The kernels that are compiled before the time for the others is estimated by them."""
TIMEOUT_SECONDS = 60.0
"""The longest wait for the last kernel of another process; kernels take tenths of a second."""
POLL_SECONDS = 0.005


def compiled_objects(
    kernels: Mapping[str, tirx.PrimFunc], target: Mapping[str, Any], deadline: float, on_kernel: Callable[[int], None]
) -> dict[str, bytes]:
    """Return the object file of each kernel; the names are their symbols.

    No kernel but the first is begun after ``deadline`` (seconds of `time.monotonic`). ``on_kernel`` is called with the
    number of finished kernels.
    """
    objects: dict[str, bytes] = {}
    most = min(own_cores().count, MOST_PROCESSES) - 1
    built_for, begin = tvm_target(target), time.monotonic()
    for name, kernel in kernels.items():
        now, done = time.monotonic(), len(objects)
        if done and now > deadline:
            break
        seconds_left = (now - begin) / done * (len(kernels) - done) if done >= LEAST_TIMED else 0.0
        others = min(most, int(seconds_left / SECONDS_PER_PROCESS))
        if others > 0:
            left = {name: kernel for name, kernel in kernels.items() if name not in objects}
            return objects | _together(left, target, deadline, others, lambda more: on_kernel(len(objects) + more))
        on_kernel(done)
        objects[name] = compiled_object(kernel, built_for)
    return objects


def _together(
    kernels: Mapping[str, tirx.PrimFunc],
    target: Mapping[str, Any],
    deadline: float,
    others: int,
    on_kernel: Callable[[int], None],
) -> dict[str, bytes]:
    """Do what `compiled_objects` does in this process and in ``others`` more."""
    with ScratchFolder("kernels") as scratch, contextlib.ExitStack() as processes:
        folder = scratch.path
        (folder / "target").write_text(json.dumps(dict(target)), encoding="utf-8")
        names = {f"{number:05}": name for number, name in enumerate(kernels)}
        for number, name in names.items():
            (folder / f"{number}.waiting").write_text(tvm.ir.save_json(kernels[name]), encoding="utf-8")
        started = [processes.enter_context(_process(folder, deadline)) for _ in range(others)]
        compile_waiting(folder, deadline, on_kernel)
        end = time.monotonic() + TIMEOUT_SECONDS
        while unfinished := [path for path in folder.glob("*.taken") if not path.with_suffix(".o").exists()]:
            if time.monotonic() > end or all(process.poll() is not None for process in started):
                break
            time.sleep(POLL_SECONDS)
        for path in unfinished:
            path.with_suffix(".o").write_bytes(compiled_object(kernels[names[path.stem]], tvm_target(target)))
        return {names[path.stem]: path.read_bytes() for path in sorted(folder.glob("*.o"))}


def compiled_object(kernel: tirx.PrimFunc, target: tvm.target.Target) -> bytes:
    """Return the object file of a scheduled kernel with a global symbol; the kernel does not check its arguments."""
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        module = tvm.tirx.build(tvm.IRModule({"kernel": kernel}), target)
    with in_memory("object") as (file, path):
        module.write_to_file(path, "o")
        return file.read()


def compile_waiting(folder: Path, deadline: float, on_kernel: Callable[[int], None] = lambda done: None) -> None:
    """Compile the kernels that no process has taken, in the order of their names, until none waits or time is over."""
    target = tvm_target(json.loads((folder / "target").read_text(encoding="utf-8")))
    for path in sorted(folder.glob("*.waiting")):
        done = sum(1 for _ in folder.glob("*.o"))
        if done and time.monotonic() > deadline:
            break
        on_kernel(done)
        taken = path.with_suffix(".taken")
        try:
            path.rename(taken)
        except FileNotFoundError:
            continue
        content = compiled_object(tvm.ir.load_json(taken.read_text(encoding="utf-8")), target)
        with replacing(path.with_suffix(".o")) as file:
            file.write(content)


@contextlib.contextmanager
def _process(folder: Path, deadline: float) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that compiles what waits in a folder; kill it at the end if it still runs."""
    process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [sys.executable, "-P", "-m", "tvm_split.compiler.kernel_process", str(folder), str(deadline), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=module_environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
