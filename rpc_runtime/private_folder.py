"""Folders that no other user can change, for files that are trusted when they are read again.

Needs Python's standard library alone: `tvm-split up` sends this file to machines that have nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0


def private_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, for this user alone; checks what is there already.

    Raises:
        OSError: it cannot be made, or `require_private` refuses it.
    """
    for folder in reversed([each for each in (path, *path.parents) if not each.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    require_private(path)


def require_private(path: Path) -> None:
    """Raise if a user other than this one and root can write to a folder or replace it.

    The folder has to be this user's own. Those above it may be root's as well; where others may write to one of them,
    it has to be sticky, as /tmp is, or lie below one that others cannot enter. A private group
    counts as its user: it has the user's name, or root's, and no other members. A missing folder is accepted.

    Raises:
        PermissionError: says what is wrong, and in which folder.
    """
    for path_form in {path.absolute(), path.resolve()}:
        _require_private(path_form)


def tighten(path: Path) -> None:
    """Remove group and other write permission from a folder of this user, which an older version may have made."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o022:
            path.chmod(status.st_mode & 0o755)


def _require_private(path: Path) -> None:
    user, is_hidden = os.geteuid(), False
    for folder in reversed((path, *path.parents)):
        try:
            entry, status = folder.lstat(), folder.stat()
        except FileNotFoundError:
            return
        is_last = folder == path
        owner = status.st_uid if entry.st_uid in (user, ROOT) else entry.st_uid  # who owns a link can replace it
        if owner != user and (is_last or owner != ROOT):
            raise PermissionError(errno.EPERM, f"user {owner} owns it, and this is user {user}", str(folder))
        is_guarded = not is_last and (is_hidden or status.st_mode & stat.S_ISVTX)
        if _others_may(stat.S_IWOTH, status) and not is_guarded:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(errno.EPERM, f"mode {mode:04o} lets other users write to it", str(folder))
        is_hidden = is_hidden or not _others_may(stat.S_IXOTH, status)


def _others_may(right: int, status: os.stat_result) -> bool:
    """Whether a user other than root and this one has a right (a bit of the mode for others) to a folder."""
    by_group = status.st_mode & (right << 3) and not _is_of_one_user(status.st_gid)
    return bool(status.st_mode & right or by_group)


def _is_of_one_user(group: int) -> bool:
    """Whether a group is root's or this user's alone: such a private group has its user's name and no members."""
    try:
        users = {"root", pwd.getpwuid(os.geteuid()).pw_name}
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name in users and users.issuperset(entry.gr_mem)
