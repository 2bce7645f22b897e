"""The user's folders, atomic replacement of files, and locks that show which processes run."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.files import (
    CACHE_VARIABLE,
    WRITING,
    cache_folder,
    is_kept,
    keep,
    locked,
    reason_and_remedy,
    replacing,
    state_folder,
    tidy,
)
from tvm_split.compiler.tuning_folder import default_folder as tuning_folder
from tvm_split.profiling.store import default_folder as measurements_folder


def test_what_a_killed_process_was_writing_is_removed_after_a_day(tmp_path: Path) -> None:
    now = time.time()
    ages = {"new": 60, "old": 1e6, "from before the clock was set back": -1e6}
    for name, age in ages.items():
        path = tmp_path / f"{WRITING}{name}"
        path.touch()
        os.utime(path, (now - age, now - age))
    (tmp_path / "kept").touch()
    os.utime(tmp_path / "kept", (0, 0))
    tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{WRITING}new", "kept"}


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(OSError) as raised, replacing(tmp_path / "key"):  # noqa: PT011
        pass
    text = f"(Is a directory: {tmp_path / 'key'}): remove that folder"
    assert reason_and_remedy(raised.value, "--cache") == text


def test_one_variable_holds_for_all_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = {"tuning": tuning_folder, "measurements": measurements_folder}
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert {name: folder() for name, folder in folders.items()} == {name: tmp_path / name for name in folders}
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert {folder().parent for folder in folders.values()} == {tmp_path / "cache" / "tvm-split"}
    assert state_folder("tokens") == tmp_path / "state" / "tvm-split" / "tokens"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home
    with pytest.raises(InputError, match="no home"):
        cache_folder("blobs")
    assert state_folder("tokens") is None


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "name another folder with --cache"),
        (errno.EACCES, "name another folder with --cache"),
        (errno.ENOSPC, "make room there"),
        (errno.EISDIR, "remove that folder"),
        (errno.EMFILE, "allow more open files (ulimit -n 1024)"),
        (errno.EPERM, "repair owner and mode (chown, chmod go-w)"),
        (errno.ETIMEDOUT, "find that process with fuser and end it"),
    ],
)
def test_an_unusable_folder_has_one_remedy(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number), "/cache")
    assert reason_and_remedy(error, "--cache") == f"({os.strerror(number)}: /cache): {remedy}"


def test_what_is_not_finished_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        print(b"new", file.write("no bytes"))  # type: ignore[arg-type]
    assert path.read_text() == "old"
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_names_the_file_that_is_meant(tmp_path: Path) -> None:
    """On a full disk the system names no file, and the name of the temporary file would not help."""
    path = tmp_path / "found.json"

    def write() -> None:
        with replacing(path) as file, Path("/dev/full").open("wb", buffering=0) as full:
            os.dup2(full.fileno(), file.fileno())
            file.write(b"content")

    with pytest.raises(OSError, match=r"No space left on device: .*found.json"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(200):
            with locked(tmp_path / "lock"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with locked(tmp_path / "lock"), pytest.raises(TimeoutError, match="lock"), locked(tmp_path / "lock", 0.1):
        pass


def test_a_lock_that_others_could_take_is_made_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o644)
    with locked(path):
        assert path.stat().st_mode & 0o077 == 0
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(PermissionError, match=str(path)), locked(path):
            pass


def test_who_keeps_a_file_lives(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as owner, path.open("rb") as reader:
        assert not is_kept(reader)
        keep(owner)
        assert is_kept(reader)
    with path.open("rb") as reader:
        assert not is_kept(reader)
