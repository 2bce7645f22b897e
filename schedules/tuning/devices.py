"""The places where kernels are measured: this machine, or the devices of one key at a TVM RPC tracker."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from schedules.tuning.errors import DeviceError

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class GpuNeeds:
    """How CUDA kernels are compiled, and what a device needs to run them.

    ``code`` turns CUDA source into what a worker loads; it runs in a process of its own. ``driver`` is the CUDA version
    that the device's driver must support (13000 is 13.0). ``is_source``: this machine has no nvcc, so the device must
    have one.
    """

    arch: str
    driver: int
    is_source: bool
    code: Callable[[str], str]


@dataclass(frozen=True)
class Tracker:
    """The devices that registered with a TVM RPC tracker under one key.

    ``list_servers`` returns the key of every server there, whether kernels can be tuned on it, and its state; it raises
    a `DeviceError` if no tracker answers. A measurement may take ``session_timeout_seconds`` on a device. If no device
    answers, the run waits for one for ``device_timeout_seconds``.
    """

    host: str
    port: int
    key: str
    list_servers: Callable[[], Sequence[tuple[str, bool, str]]]
    session_timeout_seconds: int = 20
    device_timeout_seconds: float = 30.0

    def wait_for_devices(self) -> int:
        """Wait for devices and return their number, at least one.

        Raises:
            DeviceError: no device registered within `device_timeout_seconds`, or there is no tracker.
        """
        deadline = time.monotonic() + self.device_timeout_seconds
        while True:
            try:
                return self.count_devices()
            except DeviceError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def count_devices(self) -> int:
        """Return the number of devices that are registered now and can be tuned on, at least one.

        This project's workers tell the tracker whether they allow tuning and whether they hold a deployment.

        Raises:
            DeviceError: there is no such device, or no tracker answers.
        """
        servers = self.list_servers()
        workers = [(tunes, state) for key, tunes, state in servers if key == self.key]
        count = sum(tunes and state != "deployed" for tunes, state in workers)
        if count == 0 and workers:
            deployed = sum(tunes for tunes, _ in workers)
            raise DeviceError(
                f"of {len(workers)} workers of key {self.key!r} at the tracker {self.host}:{self.port}, {deployed} "
                f"hold a deployment, which tuning would disturb, and {len(workers) - deployed} do not let kernels be "
                "tuned (`tvm-split worker --insecure-tuning` does): end the deployments, or start more"
            )
        if count == 0:
            keys = ", ".join(sorted({key for key, _, _ in servers})) or "none"
            raise DeviceError(
                f"the tracker {self.host}:{self.port} knows no device of key {self.key!r} (keys there: {keys}); "
                f"see `python -m tvm.exec.query_rpc_tracker --host {self.host} --port {self.port}`, and start a server "
                f"on the device: `python -m tvm.exec.rpc_server --tracker {self.host}:{self.port} --key {self.key}`, "
                "or, for a GPU, `tvm-split worker` with these and --insecure-tuning"
            )
        return count

    def no_answer(self, reason: str) -> DeviceError:
        lines = reason.strip().splitlines()
        return DeviceError(
            f"devices of key {self.key!r} are registered with the tracker {self.host}:{self.port}, but none answers "
            f"({lines[-1] if lines else 'no reason given'}); start their servers again; "
            f"`python -m tvm.exec.query_rpc_tracker --host {self.host} --port {self.port}` lists them"
        )

    def misfit(self, problem: str) -> DeviceError:
        return DeviceError(f"a device of key {self.key!r} at the tracker {self.host}:{self.port} {problem}")


# The functions for other processes are made by functions that return functions. They are pickled with their code, so
# that such a process does not have to import this package.

GPU_FUNCTION = "tvm_split.tuning.gpu"
"""A function of workers that allow tuning: it describes their GPU as JSON."""
CPU_EVICTION = "cache_flush_cpu_non_first_arg"
GPU_EVICTION = "tvm_split.tuning.evict"
"""These functions of a device evict its caches before a timed run; the first is TVM's, the second our workers'."""
FILL = "tvm.contrib.random.random_fill_for_measure"
FILLED_ELEMENTS = 1 << 20
"""On this machine further elements of an argument repeat these: to fill 411 MB takes 3.9 s, to repeat .2 s."""
Connect = Callable[[], Any]
"""Opens a session with a device; returns it or, as text, why the device must not measure."""


def prepare_process(threads: int, folder: str) -> Callable[[], None]:
    """Return a function that sets a process's number of kernel threads and its folder for temporary files."""

    def prepare() -> None:
        import os
        import tempfile

        os.environ["TVM_NUM_THREADS"] = str(threads)
        os.environ["TMPDIR"] = tempfile.tempdir = folder

    return prepare


def session_at(tracker: Tracker, problem_of: Callable[[Any], str]) -> Connect:
    """Return a function that connects to one of the tracker's devices.

    ``problem_of`` returns why the device of a session must not measure, or an empty text.
    """
    host, port, key, seconds = tracker.host, tracker.port, tracker.key, tracker.session_timeout_seconds

    def connect() -> Any:
        from tvm import rpc

        session = rpc.connect_tracker(host, port).request(key, priority=1, session_timeout=seconds)
        return problem_of(session) or session

    return connect


def probe_of(connect: Connect | None) -> Callable[[], str]:
    """Return a function that returns why the device that answers must not measure, or an empty text."""

    def probe() -> str:
        session = connect() if connect is not None else ""
        return session if isinstance(session, str) else ""

    return probe


def threads_problem(threads: int) -> Callable[[Any], str]:
    """Return a function that returns a text if a session's device has another number of threads, else an empty one."""

    def problem_of(session: Any) -> str:
        actual = int(session.get_function("runtime.NumThreads")())
        if actual == threads:
            return ""
        return (
            f"computes with {actual} threads, and the target says {threads}; start its server with "
            f"TVM_NUM_THREADS={threads}, or give --threads {actual}"
        )

    return problem_of


def gpu_problem(needs: GpuNeeds) -> Callable[[Any], str]:
    """Return a function that returns why a session's device does not have the needed GPU, or an empty text."""
    arch, driver, is_source, function = needs.arch, needs.driver, needs.is_source, GPU_FUNCTION

    def text(version: int) -> str:
        return f"{version // 1000}.{version % 1000 // 10}"

    def problem_of(session: Any) -> str:
        import json

        try:
            gpu = json.loads(session.get_function(function)())
        except AttributeError:  # TVM's client raises this for a missing function
            return (
                "is a server of TVM's own, which does not load the kernels that are sent, nor say which GPU it has: "
                "start `tvm-split worker --tracker HOST:PORT --key KEY --insecure-tuning` on a machine with a GPU"
            )
        who = f"(the worker on {gpu['hostname']})"
        if not gpu["arch"]:
            return f"{who} has no GPU to measure on, and the target says {arch}: {gpu['problem']}"
        if gpu["arch"] != arch.rstrip("af"):
            return (
                f"{who} has a GPU of {gpu['arch']}, and the target says {arch}; give the target arch {gpu['arch']}, "
                "or the key of other devices"
            )
        if gpu["driver"] < driver:
            return (
                f"{who} has a driver for CUDA {text(gpu['driver'])}, and the kernels need one for {text(driver)}; "
                "update the driver"
            )
        if is_source and not gpu["compiler"]:
            return (
                f"{who} has no nvcc, and neither has this machine, so the kernels would be source; install one here: "
                "pip install 'tvm-split[cuda]'"
            )
        return ""

    return problem_of


def build_into(linker: tuple[str, ...] | None, code: Callable[[str], str] | None = None) -> Callable[[Any], str]:
    """Return a function that compiles a (module, target), links a temporary library, and returns the library's path.

    ``code`` turns CUDA source into what replaces it in the library; an error that it raises is the reason why the build
    fails. MetaSchedule's own default takes 20 seconds more, because it imports intrinsics of GPUs.
    """

    def build(task: Any) -> str:
        import os
        import subprocess
        import tempfile

        from tvm.driver import build as compile_module

        module, target = task
        if code is not None:
            import tvm_ffi

            make = code
            tvm_ffi.register_global_func(
                "tvm_callback_cuda_postproc", lambda source, target: make(source), override=True
            )
        compiled = compile_module(module, target=target)
        handle, path = tempfile.mkstemp(suffix=".so")
        os.close(handle)

        def link(output: Any, objects: Any, options: Any = None) -> None:
            files = [objects] if isinstance(objects, str) else list(objects)
            command = [*(linker or ()), "-shared", "-fPIC", "-o", output, *files, *(options or ())]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603

        compiled.export_library(path, **({"fcompile": link} if linker else {}))
        return path

    return build


def timed_in_turn(
    connect: Connect | None,
    arguments: Sequence[tuple[tuple[int, ...], str]],
    names: tuple[str, ...],
    rounds: int,
    runs: int,
    kind: str,
    eviction: str,
    seconds: float,
) -> Callable[[str], list[float] | str]:
    """Return a function that times a library's functions in turn on one device, so that a slowdown affects all.

    ``connect`` opens a session with the device; without it this machine measures. ``arguments`` are the shapes and
    dtypes of the functions' arguments, which get random values. Before each run, the device's function ``eviction``
    evicts every argument but the first from the caches: in a network weights come from memory, and the data from the
    previous kernel. The result has the median seconds of ``runs`` runs for every name, ``rounds`` times over, round by
    round; or it is the text that ``connect`` returned. There are fewer runs, but one, where all would take more than
    ``seconds``: to evict 400 MB takes .7 s.
    """
    fill, block = FILL, FILLED_ELEMENTS

    def measure(path: str) -> list[float] | str:
        import os
        import statistics
        import time

        import numpy as np
        import tvm
        import tvm_ffi

        if connect is None:
            module, device, filler = tvm.runtime.load_module(path), tvm.device(kind, 0), tvm_ffi.get_global_func(fill)
        else:
            session = connect()
            if isinstance(session, str):
                return session
            session.upload(path)
            module, device = session.load_module(os.path.basename(path)), session.device(kind, 0)  # noqa: PTH119
            filler = session.get_function(fill)
        values = [tvm.runtime.empty(shape, dtype, device) for shape, dtype in arguments]
        for value, (shape, dtype) in zip(values, arguments, strict=True):
            if connect is not None or int(np.prod(shape)) <= block:
                filler(value)
            else:
                filled = tvm.runtime.empty((block,), dtype, device)
                filler(filled)
                value.copyfrom(np.resize(filled.numpy(), shape))

        def evaluators(repeat: int) -> list[Any]:
            return [module.time_evaluator(name, device, number=1, repeat=repeat, f_preproc=eviction) for name in names]

        began = time.perf_counter()
        for evaluator in evaluators(1):
            evaluator(*values)
        fitting = int(seconds / (rounds * (time.perf_counter() - began)))
        timed = evaluators(max(1, min(runs, fitting)))
        device.sync()
        return [float(statistics.median(evaluator(*values).results)) for _ in range(rounds) for evaluator in timed]

    return measure
