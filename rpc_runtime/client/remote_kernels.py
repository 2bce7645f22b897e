"""Times kernels on another machine through its worker. Does not need TVM."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rpc_runtime.client.watch import WorkerWatch
from rpc_runtime.client.worker_client import WorkerClient
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.processes import Closing
from rpc_runtime.program.measurements import KernelSet, KernelTime, TimingEffort
from rpc_runtime.wire.channels import WorkerEndpoint


class RemoteKernels(Closing):
    """Times kernels that stay loaded on a worker until `close`. A context manager.

    Every call raises:
        WorkerUnavailableError: the worker cannot be reached, or has disconnected.
        WorkerError: the worker refuses: another client is timing, or it does not have the device or the memory.
        DeadlineError: no answer within ``timeout_seconds`` beyond the time limit of the work.
    """

    def __init__(self, endpoint: WorkerEndpoint, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._connection = WorkerClient(endpoint, secrets.token_hex(16))
        clients = {endpoint.machine: self._connection}
        self._watch = WorkerWatch(clients, lambda error: self._connection.close(), model="kernels to time")
        try:
            self._watch.start()
        except BaseException:
            self.close()
            raise

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int:
        """Send the library if it is missing, and load the kernels; return the bytes allocated for their arguments."""
        seconds = self._timeout_seconds
        with self._explained():
            load = partial(self._connection.load_kernels, kernels, seconds)
            return self._connection.with_blobs([kernels.library], blob_path, seconds, load)[1]

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]:
        """Return the time of each loaded kernel, in order."""
        with self._explained():
            return self._connection.time_kernels(effort, self._timeout_seconds)

    def close(self) -> None:
        """Free the kernels on the worker by ending the watch that keeps them. Idempotent."""
        self._watch.close()
        self._connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace an error of the body, such as a broken connection, by its root cause if the watch finds one."""
        try:
            yield
        except TvmSplitError as error:
            raise self._watch.cause_of(error) from None
