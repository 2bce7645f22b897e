"""Which thread computes: TVM keeps a pool of workers for each that calls, whose size is fixed when it is first used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tvm_ffi

Result = TypeVar("Result")


class ComputingThread:
    """Runs functions where TVM uses ``threads`` threads, one after another.

    That is the caller's thread where its pool has so many threads or is yet to be made (a network of 6 ms gains half a
    millisecond: its data stay in that core's cache), else, or without ``on_calling_thread``, a thread of its own.
    """

    def __init__(self, threads: int, *, on_calling_thread: bool = True) -> None:
        self._threads = threads
        self._on_calling_thread = on_calling_thread
        self._own = ThreadPoolExecutor(1, thread_name_prefix="tvm-split-in-process")

    def run(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        # TVM asks the environment anew at every parallel loop.
        with _environment(TVM_NUM_THREADS=str(self._threads), TVM_BIND_THREADS="0"):
            if self._on_calling_thread and _pool_of_this_thread() == self._threads:
                return compute(*arguments)
            return self._own.submit(compute, *arguments).result()

    def close(self) -> None:
        self._own.shutdown()


def _pool_of_this_thread() -> int:
    """How many threads TVM uses for the calling one; the environment decides where this is asked first."""
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """The environment with some variables set, and afterwards as it was."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
