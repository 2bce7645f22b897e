"""The lock around code with process-wide state: TVM's Python functions, and the tracing of frameworks.

TVM keeps its current builder and its current tag in class variables, and torch.export and the frontends replace
methods of classes while they trace. Such code fails in several threads at once, or loses layer names without an error.
"""

import threading
from contextlib import ContextDecorator


class _Lock(ContextDecorator):
    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


ONE_AT_A_TIME = _Lock()
"""Held by the only thread that may import, rewrite or compile a network: in a block, or as a function's decorator."""
