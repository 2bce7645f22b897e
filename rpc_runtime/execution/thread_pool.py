"""Chooses the thread that computes: TVM keeps a thread pool per calling thread, whose size is fixed at first use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tvm_ffi

Result = TypeVar("Result")


class ComputingThread:
    """Runs functions in a thread for which TVM uses ``threads`` threads, one after another in the whole process.

    This is the calling thread if ``on_calling_thread``, ``threads`` is 1, and TVM's pool of that thread has no other
    threads (or is not made yet). A network of 6 ms is then half a millisecond faster, as its data stay in that core's
    cache. Otherwise it is a separate thread: a process forked from a thread whose pool has others never exits.
    """

    def __init__(self, threads: int, *, on_calling_thread: bool = True) -> None:
        self._threads = threads
        self._on_calling_thread = on_calling_thread
        self._own = ThreadPoolExecutor(1, thread_name_prefix="tvm-split-in-process")

    def run(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        # TVM reads the environment at every parallel loop.
        with _environment(TVM_NUM_THREADS=str(self._threads), TVM_BIND_THREADS="0"):
            if self._on_calling_thread and self._threads == 1 == _pool_of_this_thread():
                return compute(*arguments)
            return self._own.submit(compute, *arguments).result()

    def close(self) -> None:
        self._own.shutdown()


def _pool_of_this_thread() -> int:
    """Return the size of TVM's pool of the calling thread; the first call makes the pool as the environment says."""
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


_ENVIRONMENT = threading.Lock()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables while the body runs, for one body at a time."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})
