"""Temporary folders that do not outlive their process, whatever ends it.

A killed process cannot remove its folders. So each folder has a file that its owner keeps locked, and making a new
folder first removes all folders whose lock is free. The lock is also held while a folder is removed. So if a new folder
is removed as an orphan just before its owner locks it, the owner notices that and makes another one.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from functools import partial
from pathlib import Path

from rpc_runtime.files import try_lock
from rpc_runtime.processes import Closing, OwnProcess, before_end, cleared

PREFIX = "tvm-split-scratch-"
LOCK = ".owner"


class ScratchFolder(Closing):
    """A temporary folder; removed by `close`, at garbage collection, or after its process ended. A context manager."""

    def __init__(self, purpose: str) -> None:
        remove_orphans()
        owner = OwnProcess()
        self.path, lock = _make(purpose)
        # Not `close`, which does nothing if a signal comes while it is at work in another thread.
        before_end(self.path, partial(_remove_own, self.path, owner))
        self._remove = weakref.finalize(self, _release, self.path, lock, owner)

    def close(self) -> None:
        """Remove the folder and all in it."""
        self._remove()


def remove_orphans() -> None:
    """Remove this user's scratch folders whose owners are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():  # lstat: a link could belong to another user
                _remove_orphan(path)


def _make(purpose: str) -> tuple[Path, int]:
    """Make a folder; return it and the descriptor of its locked file."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink > 0:
            return path, lock
        os.close(lock)


def _remove_own(path: Path, owner: OwnProcess) -> None:
    if owner.is_this:  # a fork has a copy of this object, and destroys it too
        shutil.rmtree(path, ignore_errors=True)


def _release(path: Path, lock: int, owner: OwnProcess) -> None:
    _remove_own(path, owner)
    cleared(path)
    os.close(lock)


def _remove_orphan(path: Path) -> None:
    """Remove a folder whose lock is free; raise an `OSError` for one without a lock file, which is being made."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        if try_lock(lock):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
