"""Temporary folders that do not outlive their process, whatever ends it.

A process that is killed cannot remove its folders. So each folder holds a file that its owner keeps locked; whoever
makes the next folder removes those whose lock nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "tvm-split-scratch-"
LOCK = ".owner"


class ScratchFolder:
    """A temporary folder that goes with `close`, with this object, or else after its process. A context manager."""

    def __init__(self, purpose: str) -> None:
        remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the folder and all in it."""
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def remove_orphans() -> None:
    """Remove this user's scratch folders whose owners are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and _is_orphan(path):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _is_orphan(path: Path) -> bool:
    """Whether the folder has a lock file that nobody holds. One without it is too young, or none of ours."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
