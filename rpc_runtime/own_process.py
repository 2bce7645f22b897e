"""What belongs to one process: those that are forked from it share its memory, and must leave alone what is in it."""

from __future__ import annotations

import os

from rpc_runtime.errors import WorkerError


class OwnProcess:
    """The process that this was made in."""

    def __init__(self) -> None:
        self._identifier = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the calling one."""
        return os.getpid() == self._identifier

    def require(self) -> None:
        """A `WorkerError` if it is not: a fork has no threads but the one that forked, and locks that nobody frees."""
        if not self.is_this:
            raise WorkerError(
                "this pipeline belongs to the process that opened it, from which the calling one was forked: let that "
                "one run it, or open another one here"
            )
