"""Workers whose stages are on the stand-in of a GPU, each in a process of its own.

``python -m tests.helpers.rpc_runtime.gpu_worker LIBRARY …`` is a worker, with its arguments. Stages are
not loaded: they are `PlainStage` on the stand-in's streams. All else is a worker's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpc_runtime.program.program import StageSpec
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.worker_process import ROOT, announced

HALF_A_COPY_MICROSECONDS = 300
"""Maximum delay of each half of a copy."""


def main(library: str, *arguments: str) -> int:
    """Run a worker."""
    from rpc_runtime.worker.runtime_alone import load_runtime

    load_runtime()
    from rpc_runtime.execution.cuda_calls import CudaCalls
    from rpc_runtime.execution.device_transfers import DeviceTransfers
    from rpc_runtime.processes import take_stdout
    from rpc_runtime.worker import loaded_program, process
    from tests.helpers.rpc_runtime.cuda_stand_in import Launched, on_device

    cuda = ctypes.CDLL(library)
    cuda.standInSlow(HALF_A_COPY_MICROSECONDS)

    def transfers_of(stages: Sequence[StageSpec]) -> DeviceTransfers:
        return DeviceTransfers(CudaCalls(cuda), on_device(cuda))

    def load_stage(self: Any, stage: StageSpec, cache: Any, deadline: Any, caller_waits: Any, transfers: Any) -> Any:
        return Launched(stage, cuda, transfers)

    loaded_program.overlapping_transfers = transfers_of  # type: ignore[assignment]
    loaded_program.LoadedProgram._load_stage = load_stage  # type: ignore[method-assign]
    return process.main(take_stdout(), arguments)


@dataclass(frozen=True)
class GpuWorkers:
    """Running workers by name."""

    endpoints: Mapping[str, WorkerEndpoint]
    processes: Mapping[str, subprocess.Popen[str]]

    def areas(self, name: str) -> int:
        """Return how many blocks of device memory a worker has allocated; 0 if it has ended."""
        try:
            maps = Path(f"/proc/{self.processes[name].pid}/maps").read_text()
        except OSError:
            return 0
        return maps.count("memfd:stand-in")


@contextlib.contextmanager
def gpu_workers(
    names: Sequence[str],
    library: Path,
    folder: Path,
    *,
    environment: Callable[[str], Mapping[str, str]] = lambda name: {},
) -> Iterator[GpuWorkers]:
    """Start workers and end them afterwards; fail if one has reported undefined use of CUDA.

    ``environment`` returns the variables of a worker by its name.
    """
    processes: dict[str, subprocess.Popen[str]] = {}
    endpoints: dict[str, WorkerEndpoint] = {}
    logs = {name: folder / f"{name}.log" for name in names}
    token = folder / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    try:
        for name in names:
            command = [sys.executable, "-m", "tests.helpers.rpc_runtime.gpu_worker", str(library)]
            command += ["--json", "--name", name, "--cache", str(folder)]
            with logs[name].open("w") as log:
                processes[name] = subprocess.Popen(
                    [*command, "--token-file", str(token), "--log-level", "warning"],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                    env={**os.environ, "STAND_IN_BUS": f"0000:{ord(name):x}:00.0", **environment(name)},
                )  # fmt: skip
        for name, process in processes.items():
            endpoints[name] = WorkerEndpoint(name, str(announced(process)["address"]), token.read_text())
        yield GpuWorkers(endpoints, processes)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    errors = {name: log.read_text() for name, log in logs.items() if "the stand-in of CUDA" in log.read_text()}
    assert not errors, errors


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
