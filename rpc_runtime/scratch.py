"""Temporary folders that do not outlive their process, whatever ends it.

A process that is killed cannot remove its folders. So each folder holds a file that its owner keeps locked; whoever
makes the next folder removes those whose lock nobody holds any more. The lock is held while a folder is removed too; so
an owner whose new folder was taken for an orphan, in the moment before it was locked, finds it gone and makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from rpc_runtime.processes import Closing, OwnProcess, before_end, cleared

PREFIX = "tvm-split-scratch-"
LOCK = ".owner"
MADE = re.compile(rf"{PREFIX}[a-z-]+-[a-z0-9_]{{8}}")
LONGEST_TO_MAKE_SECONDS = 60.0
"""From a folder's name to its lock, however busy a host is."""


class ScratchFolder(Closing):
    """A temporary folder that goes with `close`, with this object, or else after its process. A context manager."""

    def __init__(self, purpose: str) -> None:
        remove_orphans()
        self.path, lock = _make(purpose)
        self._remove = weakref.finalize(self, _remove_own, self.path, lock, OwnProcess())
        before_end(self.path, self._remove)

    def close(self) -> None:
        """Remove the folder and all in it."""
        self._remove()


def remove_orphans() -> None:
    """Remove this user's scratch folders whose owners are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():  # a link may be anybody's
                _remove_orphan(path)


def _make(purpose: str) -> tuple[Path, int]:
    """A new folder, and the open lock file that makes it this process's."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink > 0:
            return path, lock
        os.close(lock)


def _remove_own(path: Path, lock: int, owner: OwnProcess) -> None:
    if owner.is_this:  # a fork, whose copy of this object goes as well, shares the lock
        _remove(path, lock)


def _remove(path: Path, lock: int) -> None:
    cleared(path)
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_orphan(path: Path) -> None:
    """Remove a folder with a lock file that nobody holds, or an old one without: a worker has made that again.

    A young one without it is just being made.
    """
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if MADE.fullmatch(path.name) and time.time() - path.stat().st_mtime > LONGEST_TO_MAKE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
    else:
        _remove(path, lock)
