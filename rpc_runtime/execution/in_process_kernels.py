"""Times kernels in this process, without a worker; `RemoteKernels` does it on another machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.blob_store import read_blob
from rpc_runtime.execution.kernel_timer import KernelTimer
from rpc_runtime.processes import Closing
from rpc_runtime.program.kernel_times import KernelSet, KernelTime, TimingEffort


class InProcessKernels(Closing):
    """Times the kernels of one loaded library at a time with ``threads`` threads. A context manager."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._timer: KernelTimer | None = None

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int:
        """Load kernels, replacing those loaded before; return the bytes allocated for their arguments.

        Raises:
            WorkerError: this machine cannot run them, or does not have the memory.
            BlobError: the library is missing or damaged.
        """
        self.close()
        library = read_blob(blob_path(kernels.library.sha256), kernels.library)
        self._timer = KernelTimer(kernels, library, self._threads)
        return self._timer.allocated_bytes

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]:
        """Return the time of each loaded kernel, in order. Raises WorkerError if none are loaded."""
        if self._timer is None:
            raise WorkerError("no kernels are loaded that could be timed")
        return self._timer.measure(effort)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
            self._timer = None
