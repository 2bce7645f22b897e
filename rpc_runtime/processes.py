"""This process and those that it starts: what is closed, what ends with it, what a fork must leave alone."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Self

from rpc_runtime.errors import WorkerError

_LEFT: dict[Hashable, Callable[[], object]] = {}
os.register_at_fork(after_in_child=_LEFT.clear)  # it is the other process's


class Closing(ABC):
    """A context manager that gives itself."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def do_all(steps: Iterable[Callable[[], object]]) -> Exception | None:
    """Takes each step, also after others have failed; the first error."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            first = first or error
    return first


def before_end(key: Hashable, clear: Callable[[], object]) -> None:
    """Have ``clear`` called when the process ends, unless ``key`` is `cleared` by then."""
    _LEFT[key] = clear


def cleared(key: Hashable) -> None:
    _LEFT.pop(key, None)


@atexit.register
def clear_away() -> None:
    """Clear all that is left, the latest first; what fails keeps nothing else from being cleared."""
    while _LEFT:
        with contextlib.suppress(Exception):
            _LEFT.popitem()[1]()


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


def module_command(module: str) -> list[str]:
    """Return the command that runs ``rpc_runtime.MODULE`` without importing from the current folder."""
    return [sys.executable, "-P", "-m", f"rpc_runtime.{module}"]


def module_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with ``variables`` and this package's folder first in PYTHONPATH."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, **variables}
