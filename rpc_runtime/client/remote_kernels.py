"""Times kernels on another machine, through its worker. Needs no TVM."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rpc_runtime.client.watch import WorkerWatch
from rpc_runtime.client.worker_client import WorkerClient
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.processes import Closing
from rpc_runtime.program.kernel_times import KernelSet, KernelTime, TimingEffort
from rpc_runtime.wire.channels import WorkerEndpoint

CAUSE_SECONDS = 0.5

Result = TypeVar("Result")


class RemoteKernels(Closing):
    """Kernels that are loaded on a worker for as long as this lives. A context manager.

    Every call raises:
        WorkerUnavailableError: the worker cannot be reached, or went away.
        WorkerError: it refuses: another client is timing, or it lacks the device or the memory.
        DeadlineError: no answer within ``timeout_seconds`` more than the work may take.
    """

    def __init__(self, endpoint: WorkerEndpoint, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._deployment = secrets.token_hex(16)
        self._connection = WorkerClient(endpoint)
        self._failure: TvmSplitError | None = None
        machine = endpoint.machine
        self._watch = WorkerWatch(
            self._deployment, {machine: self._connection}, {machine: ()}, self._fail, lambda machine, activity: None
        )
        try:
            self._watch.start(timeout_seconds)
        except BaseException:
            self.close()
            raise

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int:
        """Sends the library if the worker lacks it, and makes ready; returns the bytes that the arguments take."""
        return self._explained(lambda: self._send_and_load(kernels, blob_path))

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]:
        """The time of each kernel that was loaded, in that order."""
        return self._explained(lambda: self._connection.time_kernels(self._deployment, effort, self._timeout_seconds))

    def close(self) -> None:
        """Frees what the worker holds, which lives as long as it is watched. May be called again."""
        self._watch.close()
        self._connection.close()

    def _send_and_load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int:
        self._connection.send_blobs(
            self._deployment, [kernels.library], blob_path, self._timeout_seconds, lambda sent, total: None
        )
        return self._connection.load_kernels(self._deployment, kernels, self._timeout_seconds)

    def _explained(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except TvmSplitError:
            # A connection that breaks in a call says less than the watch, which knows whether the worker has gone.
            if self._watch.wait_report(CAUSE_SECONDS) and self._failure is not None:
                raise self._failure from None
            raise

    def _fail(self, error: TvmSplitError) -> None:
        self._failure = error
        self._connection.close()
