"""Chooses the thread that computes: TVM keeps a thread pool per calling thread, whose size is fixed at first use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tvm_ffi

Result = TypeVar("Result")


class ComputingThread:
    """Runs functions one after another in a thread for which TVM uses ``threads`` threads.

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
        with _environment.with_(TVM_NUM_THREADS=str(self._threads), TVM_BIND_THREADS="0"):
            if self._on_calling_thread and self._threads == 1 == _pool_of_this_thread():
                return compute(*arguments)
            return self._own.submit(compute, *arguments).result()

    def close(self) -> None:
        self._own.shutdown()


class TakingTurns:
    """A fair (first in, first out) lock; Python's own locks favour the thread that held the lock last."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        own = object()
        with self._changed:
            self._queue.append(own)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is own)
            yield
        finally:
            with self._changed:
                self._queue.remove(own)
                self._changed.notify_all()


def _pool_of_this_thread() -> int:
    """Return the size of TVM's pool of the calling thread; the first call makes the pool as the environment says."""
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


class _Environment:
    """Sets environment variables that TVM reads while functions compute, then restores them.

    Callers with equal variables compute at the same time, others one after another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: dict[str, str] = {}
        self._before: dict[str, str | None] = {}
        self._users = 0

    @contextlib.contextmanager
    def with_(self, **variables: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._users == 0 or self._wanted == variables)
            if self._users == 0:
                self._wanted, self._before = variables, {name: os.environ.get(name) for name in variables}
                os.environ.update(variables)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if self._users == 0:
                    self._restore()
                    self._changed.notify_all()

    def _restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_environment = _Environment()
