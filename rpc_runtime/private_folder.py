"""Folders that no other user can change, for files that are trusted when they are read again.

Needs only Python's standard library: `tvm-split up` sends this file to machines that have nothing else.
"""

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0
ACCESS_LIST = "system.posix_acl_access"
"""Name of the extended attribute that holds a folder's access control list, which may grant more than its mode."""
LONGEST_CHAIN = 40
"""The most symbolic links in one path, as in Linux."""


def private_folder(path: Path) -> None:
    """Make a folder and missing parents for this user only; check existing folders.

    Raises:
        OSError: it cannot be made, or `require_private` refuses it.
    """
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    require_private(path)


def require_private(path: Path) -> None:
    """Raise if another user (not root) can write to a folder, or replace it or a symbolic link on its path.

    The folder must belong to this user. Its parents and symbolic links may also belong to root. If others may write to
    a parent, it must be sticky, as /tmp is, or lie below a folder that others cannot enter. A private group counts as
    its user: it has the user's name, or root's, and no other members. A missing folder is accepted.

    Raises:
        PermissionError: another user could change a folder; the message says which folder and why.
        OSError: the path has a cycle of symbolic links.
    """
    *links, folder = _links_and_target(path.absolute())
    for location in links:
        _require_private(location, may_be_roots=True)
    _require_private(folder, may_be_roots=False)


def all_can_read(path: Path) -> bool:
    """Return whether every user of this host can read an existing file, by its mode and those of the folders above it.

    False for a file on a read-only mount: there Kubernetes and container engines mount secrets, which every user of the
    container may read.
    """
    *_, file = _links_and_target(path.absolute())
    if os.statvfs(file).f_flag & os.ST_RDONLY or not file.stat().st_mode & stat.S_IROTH:
        return False
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in file.parents)


def _links_and_target(path: Path) -> list[Path]:
    """Return the symbolic links on the way to a path, in order, and its target, all with resolved parents."""
    links: list[Path] = []
    current, names = Path("/"), list(reversed(path.parts[1:]))
    while names:
        name = names.pop()
        entry = current.parent if name == ".." else current / name
        if not entry.is_symlink():
            current = entry
            continue
        links.append(entry)
        if len(links) > LONGEST_CHAIN:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = entry.readlink()
        current = Path("/") if target.is_absolute() else current
        names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return [*links, current]


def _require_private(path: Path, *, may_be_roots: bool) -> None:
    user, is_hidden = os.geteuid(), False
    for entry in reversed((path, *path.parents)):
        try:
            status = entry.lstat()
        except FileNotFoundError:
            return
        is_last = entry == path
        if status.st_uid != user and (status.st_uid != ROOT or (is_last and not may_be_roots)):
            raise PermissionError(errno.EPERM, f"user {status.st_uid} owns it, and this is user {user}", str(entry))
        if entry.is_symlink():  # the mode of a link has no meaning
            return
        is_guarded = not is_last and (is_hidden or status.st_mode & stat.S_ISVTX)
        if _others_may(stat.S_IWOTH, entry, status) and not is_guarded:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(errno.EPERM, f"mode {mode:04o} lets other users write to it", str(entry))
        is_hidden = is_hidden or not _others_may(stat.S_IXOTH, entry, status)


def _others_may(right: int, folder: Path, status: os.stat_result) -> bool:
    """Return whether a user other than root and this one has a right (a bit of the mode for others) to a folder."""
    by_group = status.st_mode & (right << 3)  # with an access control list, these bits are the most that it grants
    return bool(status.st_mode & right or (by_group and (_has_access_list(folder) or not _is_private(status.st_gid))))


def _has_access_list(folder: Path) -> bool:
    try:
        return ACCESS_LIST in os.listxattr(folder)
    except OSError:  # a file system without them
        return False


def _is_private(group: int) -> bool:
    """Return whether a group is root's or this user's alone: it has their name, and no other user belongs to it."""
    try:
        users = {"root", pwd.getpwuid(os.geteuid()).pw_name}
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    members = {*entry.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group)}
    return entry.gr_name in users and members <= users
