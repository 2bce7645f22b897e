"""Threads that compute: TVM keeps a thread pool per calling thread, whose size is fixed at first use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_ENVIRONMENT = threading.Lock()


class ComputingThread:
    """A thread for which TVM uses ``threads`` threads. Only one such thread of a process computes at a time.

    It is a thread of its own, because a process forked from a thread whose pool has others never exits.
    """

    def __init__(self, threads: int) -> None:
        self._variables = {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tvm-split-in-process")

    def submit(self, compute: Callable[[], Result]) -> Future[Result]:
        """Queue a function. Raises `RuntimeError` after `close`."""
        return self._thread.submit(self._run, compute)

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, compute: Callable[[], Result]) -> Result:
        with _ENVIRONMENT:  # TVM reads the environment at every parallel loop
            before = {name: os.environ.get(name) for name in self._variables}
            os.environ.update(self._variables)
            try:
                return compute()
            finally:
                for name in self._variables:
                    os.environ.pop(name)
                os.environ.update({name: value for name, value in before.items() if value is not None})
