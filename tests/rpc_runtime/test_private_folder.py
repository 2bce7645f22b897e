"""Folders that another user could change are rejected: by owner, mode, group, link or access control list."""

import os
import struct
from pathlib import Path

import pytest

from rpc_runtime.private_folder import private_folder

OTHER = 65534
"""A user and a group other than those that run the tests."""
NOBODY = 2**32 - 1
"""The identity of access control entries without a user or group: see acl(5)."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_may_write_to(shared: Path, mode: int) -> None:
    folder = shared / "own"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"mode {mode:04o} lets other users write to it.*{folder}"):
        private_folder(folder)


def test_a_parent_that_others_may_write_to_is_sticky_or_below_one_that_they_cannot_enter(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match=str(shared)):
        private_folder(shared / "own")
    shared.chmod(0o1777)  # as /tmp is
    private_folder(shared / "made/own")
    assert [path.stat().st_mode & 0o077 for path in (shared / "made", shared / "made/own")] == [0, 0]
    shared.chmod(0o700)
    (shared / "volume").mkdir()
    (shared / "volume").chmod(0o777)
    private_folder(shared / "volume/own")


@needs_root
def test_a_folder_of_a_group_with_other_members(shared: Path) -> None:
    os.chown(shared, 0, OTHER)
    shared.chmod(0o775)
    with pytest.raises(PermissionError, match=str(shared)):
        private_folder(shared / "own")


@needs_root
@pytest.mark.parametrize("owned", ["own", "parent", "link", "inner link"])
def test_a_folder_of_another_user(shared: Path, owned: str) -> None:
    shared.chmod(0o1777)
    parent, folder, link, inner = (shared / name for name in ("parent", "parent/own", "link", "inner"))
    folder.mkdir(parents=True)
    inner.symlink_to("parent")
    link.symlink_to(inner)
    culprit = {"own": folder, "parent": parent, "link": link, "inner link": inner}[owned]
    os.chown(culprit, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"user {OTHER} owns it.*{culprit}"):
        private_folder(link / "own")


def test_a_folder_with_an_access_list_that_admits_others(shared: Path) -> None:
    folder = shared / "own"
    folder.mkdir(mode=0o700)
    entries = [(0x01, 7, NOBODY), (0x02, 7, OTHER), (0x04, 0, NOBODY), (0x10, 7, NOBODY), (0x20, 0, NOBODY)]
    access_list = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_access", access_list)
    except OSError:
        pytest.skip("needs a file system with access control lists")
    with pytest.raises(PermissionError, match=str(folder)):
        private_folder(folder)
