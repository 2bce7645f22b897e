"""Files that persist between runs and are shared by processes: their folders, atomic replacement, and locks."""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from platformdirs import PlatformDirs

from rpc_runtime.errors import InputError

CACHE_VARIABLE = "TVM_SPLIT_CACHE"
NO_HOME = "Could not determine home directory."
"""The text of Python's RuntimeError for a user without a home, which importing TVM raises too."""
SET_HOME = "set HOME to a folder of this user, where TVM and other libraries keep files"
WRITING = ".writing-"
"""Prefix of the names of files that are being written."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a disk that is full or fails. Python's exception names no file, or the source of a copy."""
LOCK_SECONDS = 10.0
"""Timeout of a lock: longer than any process holds it to change a file."""
STALE_SECONDS = 86_400.0
"""Age after which a file that is being written counts as abandoned: no blob takes a day to write."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.05
_OWN = PlatformDirs("tvm-split", appauthor=False)


def cache_folder(subject: str) -> Path:
    """Return the folder ``subject`` in $TVM_SPLIT_CACHE, else in ``tvm-split`` in the user's cache folder.

    Raises:
        InputError: the variable is not set, and the user has no home folder.
    """
    named = os.environ.get(CACHE_VARIABLE, "")
    if named:
        return Path(named) / subject
    try:
        return _OWN.user_cache_path / subject
    except RuntimeError as error:
        raise InputError(f"this user has no home to keep a cache in: name a folder in ${CACHE_VARIABLE}") from error


def state_folder(subject: str) -> Path | None:
    """Return the folder ``subject`` in ``tvm-split`` in the user's state folder; None without a home folder."""
    try:
        return _OWN.user_state_path / subject
    except RuntimeError:
        return None


def reason_of(error: OSError) -> str:
    """Return the system's message for an error and the file that it names."""
    return ": ".join(str(part) for part in (error.strerror, error.filename2 or error.filename) if part)


def reason_and_remedy(error: OSError, setting: str) -> str:
    """Return "(REASON): REMEDY" for a folder that cannot be used; ``setting`` is the option that sets the folder."""
    remedies = {errno.EPERM: "repair owner and mode (chown, chmod go-w)", **dict.fromkeys(FULL, "make room there")}
    remedies |= dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n 1024)")
    remedies[errno.EISDIR] = "remove that folder"
    remedies[errno.ETIMEDOUT] = "find that process with fuser and end it"
    return f"({reason_of(error)}): {remedies.get(error.errno or 0, f'name another folder with {setting}')}"


def require_file(path: Path) -> None:
    """Raise an OSError for a folder, and for a pipe, socket or device, of which reading may never end."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe, socket or device, not a file", str(path))


def file_bytes(path: Path) -> bytes:
    """Return the content of a file; raises an OSError if it is not a file or cannot be read."""
    require_file(path)
    return path.read_bytes()


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[IO[bytes]]:
    """Yield a new file with mode 0600, which replaces ``path`` if the body raises nothing.

    A reader sees the old or the new content, never a part. The file is written in ``temporary``, a folder on the same
    file system; default: the folder of ``path``.

    Raises:
        OSError: it cannot be written; the error names ``path`` if the system names no file, as on a full disk.
    """
    descriptor, name = tempfile.mkstemp(dir=temporary or path.parent, prefix=WRITING)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(name).replace(path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        Path(name).unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove the files that `replacing` has left in a folder because its process was killed."""
    for path, status in statuses(folder.glob(f"{WRITING}*")):
        if abs(time.time() - status.st_mtime) > STALE_SECONDS:  # later than now after the clock was set back
            path.unlink(missing_ok=True)


def statuses(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files that still exist, with their status: other processes may rename or remove files meanwhile."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


@contextlib.contextmanager
def locked(path: Path, timeout_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold an exclusive lock on a file among all threads and processes; no other user can open the file.

    Raises:
        TimeoutError: another holder kept the lock for ``timeout_seconds``.
        PermissionError: the file is another user's.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _require_own(descriptor, path)
        deadline, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
        while not try_lock(descriptor):
            if time.monotonic() >= deadline:
                text = f"another process has held this lock for {timeout_seconds:g} s"
                raise TimeoutError(errno.ETIMEDOUT, text, str(path))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _require_own(descriptor: int, path: Path) -> None:
    """Raise if another user owns a lock file, and remove others' access: a user who can open a file can lock it."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"user {status.st_uid} owns it, and this is user {os.geteuid()}", str(path))
    if stat.S_IMODE(status.st_mode) != 0o600:
        os.fchmod(descriptor, 0o600)


def try_lock(file: IO[bytes] | int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file, or its descriptor, if no other process holds its lock; return whether it is locked now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def keep(file: IO[bytes]) -> None:
    """Lock a file until it is closed or its process ends, so that others see that the process is alive.

    The file must be one that other users cannot open: they could lock it too.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def is_kept(file: IO[bytes]) -> bool:
    """Return whether a running process holds the lock of `keep` on a file."""
    is_free = try_lock(file, fcntl.LOCK_SH)
    if is_free:
        fcntl.flock(file, fcntl.LOCK_UN)
    return not is_free
