"""Threads that sleep until others have something for them, and what to do without a lock after it was held."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

Due = deque[Callable[[], object]]
"""What to do once the lock of a pipeline or a link is released: callbacks run any code, and a thread that is woken too
early waits for the lock, or for Python's."""


def do_due(due: Due) -> None:
    """Do what is due, as the last thing before this thread waits. Call it without the lock; any thread may do it."""
    while due:
        with suppress(IndexError):  # another thread does it
            due.popleft()()


class Sleeper:
    """A thread that sleeps until another one rouses it: a queue (written in C) wakes it sooner than a condition.

    It calls `rest_locked`, releases the lock and calls `sleep`, which may also return for no reason.
    """

    def __init__(self, due: Due) -> None:
        self._due = due
        self._roused: SimpleQueue[None] = SimpleQueue()
        self._rests = False

    def rest_locked(self) -> None:
        self._rests = True

    def sleep(self, seconds: float | None = None) -> bool:
        """Wait; return whether that ended before ``seconds``."""
        try:
            self._roused.get(timeout=seconds)
        except Empty:
            return False
        finally:
            self._rests = False
        return True

    def rouse_locked(self) -> None:
        """Make it due to wake the thread, if it rests."""
        if self._rests:
            self._rests = False
            self._due.append(self.wake)

    def wake(self) -> None:
        self._roused.put(None)
