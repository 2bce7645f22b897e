"""Where kernels are measured: this machine, or the devices of one key behind a TVM RPC tracker."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.rpc import base
from tvm.s_tir import meta_schedule

from tvm_split.schedules.tuning.errors import DeviceError

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
AN_RPC_SERVER = {"tunes": True, "state": "ready"}
"""What TVM's own servers would say of themselves where workers do."""


@dataclass(frozen=True)
class Tracker:
    """The devices that registered with a TVM RPC tracker under one key.

    A measurement may take ``session_timeout_seconds`` on a device; ``device_timeout_seconds`` is how long the run waits
    for any device when none answers.
    """

    host: str
    port: int
    key: str
    session_timeout_seconds: int = 20
    device_timeout_seconds: float = 30.0

    @property
    def configuration(self) -> meta_schedule.runner.RPCConfig:
        return meta_schedule.runner.RPCConfig(
            self.host, self.port, self.key, session_timeout_sec=self.session_timeout_seconds
        )

    def wait_for_devices(self) -> int:
        """The number of devices, at least one.

        Raises:
            DeviceError: there was none within `device_timeout_seconds`, or no tracker.
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
        """The number of devices that are registered now, at least one; else a `DeviceError`.

        Workers of this project say there whether they can be tuned on, and whether they run something else.
        """
        servers = self._listed()
        own = [(tunes, state) for key, tunes, state in servers if key == self.key]
        count = sum(tunes and state != "deployed" for tunes, state in own)
        if count == 0 and own:
            deployed = sum(tunes for tunes, _ in own)
            raise DeviceError(
                f"of {len(own)} workers of key {self.key!r} at the tracker {self.host}:{self.port}, {deployed} hold a "
                f"deployment, which tuning would disturb, and {len(own) - deployed} do not let kernels be tuned "
                "(`tvm-split worker --insecure-tuning` does): end the deployments, or start more"
            )
        if count == 0:
            others = ", ".join(sorted({key for key, _, _ in servers})) or "none"
            raise DeviceError(
                f"the tracker {self.host}:{self.port} knows no device of key {self.key!r} (keys there: {others}); "
                f"see `python -m tvm.exec.query_rpc_tracker --host {self.host} --port {self.port}`, and start a server "
                f"on the device: `python -m tvm.exec.rpc_server --tracker {self.host}:{self.port} --key {self.key}`"
            )
        return count

    def no_answer(self, reason: str) -> DeviceError:
        lines = reason.strip().splitlines()
        return DeviceError(
            f"devices of key {self.key!r} are registered with the tracker {self.host}:{self.port}, but none answers "
            f"({lines[-1] if lines else 'no reason given'}); start their servers again; "
            f"`python -m tvm.exec.query_rpc_tracker --host {self.host} --port {self.port}` lists them"
        )

    def wrong_threads(self, found: int, wanted: int) -> DeviceError:
        return DeviceError(
            f"a device of key {self.key!r} computes with {found} threads, and the target says {wanted}; start its "
            f"server with TVM_NUM_THREADS={wanted}, or give --threads {found}"
        )

    def _listed(self) -> list[tuple[str, bool, str]]:
        """Of every server: its key, whether kernels can be tuned there, and its state."""
        try:
            # TVM's own connection tries for a minute, and waits for an answer without end.
            with socket.create_connection((self.host, self.port), ANSWER_SECONDS) as tracker:
                magic = base.RPC_TRACKER_MAGIC.to_bytes(4, "little")
                tracker.sendall(magic)
                if base.recvall(tracker, 4) != magic:
                    raise OSError("who answers there is none")
                base.sendjson(tracker, [base.TrackerCode.SUMMARY])
                entries = base.recvjson(tracker)[1]["server_info"]
            servers = [(str(each["key"]), each.get("tvm_split", AN_RPC_SERVER)) for each in entries]
            return [(key.removeprefix("server:"), bool(said["tunes"]), str(said["state"])) for key, said in servers]
        except (OSError, ValueError, TypeError, AttributeError, LookupError, struct.error) as error:
            raise DeviceError(
                f"no tracker answers at {self.host}:{self.port} ({error}); start one there: "
                f"`python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {self.port}`"
            ) from error


# What is sent to the processes of builders and runners is made by functions that return functions: those are pickled
# with their code, so that such a process need not be able to import this package.


def prepare_process(threads: int) -> Callable[[], None]:
    """First thing in such a process: the threads of the kernels, and Ctrl-C left to the parent, who ends it."""

    def prepare() -> None:
        import os
        import signal

        os.environ["TVM_NUM_THREADS"] = str(threads)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    return prepare


WRONG_THREADS = "the device computes with another number of threads:"


def session_with_threads(threads: int) -> Callable[[Any], Any]:
    """Connects to a device and asks how many threads its kernels get: only its own environment can decide that."""
    marker = WRONG_THREADS

    def connect(configuration: Any) -> Any:
        session = configuration.connect_server()
        found = int(session.get_function("runtime.NumThreads")())
        if found != threads:
            raise RuntimeError(f"{marker} {found}.")
        return session

    return connect


def found_threads(message: str) -> int | None:
    """The number of threads in the error of `session_with_threads`, or None if the error is another."""
    _, separator, rest = message.rpartition(WRONG_THREADS)
    return int(rest.split(".")[0]) if separator else None


def build_into(folder: str, linker: tuple[str, ...] | None) -> Callable[[Any], str]:
    """Compiles a (module, target) and links it into a library in a folder, so that a device needs no compiler.

    MetaSchedule's own default takes 20 seconds more, for importing intrinsics of GPUs.
    """

    def build(task: Any) -> str:
        import os
        import subprocess
        import tempfile

        from tvm.driver import build as compile_module

        module, target = task
        compiled = compile_module(module, target=target)
        handle, path = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)

        def link(output: Any, objects: Any, options: Any = None) -> None:
            files = [objects] if isinstance(objects, str) else list(objects)
            command = [*(linker or ()), "-shared", "-fPIC", "-o", output, *files, *(options or ())]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603

        compiled.export_library(path, **({"fcompile": link} if linker else {}))
        return path

    return build


def evaluate_in_turn(names: tuple[str, ...], rounds: int, runs: int) -> Callable[..., list[float]]:
    """Times functions of one library in turn on one device: what slows the device for a while slows all of them.

    Every argument but the first leaves the caches before each run, since in a network weights come from memory, and the
    data from the kernel before. The result has the median of ``runs`` runs for every name, ``rounds`` times over, round
    by round. Takes the arguments of both MetaSchedule's local and remote runner, which differ in a leading session.
    """

    def evaluate(*arguments: Any) -> list[float]:
        module, device, _, repeated = arguments[-4:]
        (values,) = repeated
        evaluators = [
            module.time_evaluator(name, device, number=1, repeat=runs, f_preproc="cache_flush_cpu_non_first_arg")
            for name in names
        ]
        device.sync()
        return [float(statistics.median(each(*values).results)) for _ in range(rounds) for each in evaluators]

    return evaluate
