"""Write the files and folders that a user names: first the whole result beside the path, then a move to the path.

A full disk or Ctrl-C leaves what was there before, and nothing else.
"""

import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rpc_runtime.files import FULL
from rpc_runtime.processes import before_end, cleared
from tvm_split.errors import OutputError

PREFIX = ".tvm-split-"
"""Prefix of the names of folders that are being written; one is left behind only if its process is killed."""
REMOVALS = 50


def is_unfinished(path: Path) -> bool:
    """Whether ``path`` is an incomplete file or folder, which a killed process left behind."""
    return path.name.startswith(PREFIX)


@contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Yield the path at which to write a file or folder; it is moved to ``path`` if the body raises nothing.

    The body must not create missing parents of the yielded path: a signal may have removed them. A new file gets the
    mode of the file that it replaces. An existing folder stays and only its content is replaced, since it may be a
    mounted volume. A pipe or device is written directly.

    Raises:
        OutputError: it cannot be written.
    """
    path = Path(path)
    target = path.resolve()
    scratch = (target if target.is_dir() else target.parent) / f"{PREFIX}{secrets.token_hex(8)}"
    before_end(scratch, partial(_remove, scratch))  # before it exists, so that a signal never leaves it behind
    try:
        if target.exists() and not target.is_dir() and not target.is_file():
            yield path
            return
        scratch.mkdir(mode=0o700)
        yield scratch / target.name
        cleared(scratch)  # from here on a signal would remove what is replaced
        _put(scratch / target.name, target, scratch / "replaced")
    except OSError as error:
        is_ours = error.filename is None or str(scratch) in str(error.filename) or error.errno in FULL
        if not is_ours:
            raise
        advice = "; make room, or write it elsewhere" if error.errno in FULL else ""
        raise OutputError(f"{path} cannot be written: {error.strerror}{advice}") from error
    finally:
        _remove(scratch)
        cleared(scratch)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8. Raises `OutputError`."""
    with written(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _put(new: Path, target: Path, replaced: Path) -> None:
    """Move a file or the content of a folder to its place; the former content of a folder goes to ``replaced``."""
    if target.is_dir():
        replaced.mkdir()
        moves = [(entry, replaced / entry.name) for entry in target.iterdir() if entry != replaced.parent]
        moves += [(entry, target / entry.name) for entry in new.iterdir()]
        done: list[tuple[Path, Path]] = []
        try:
            for source, destination in moves:
                source.rename(destination)
                done.append((source, destination))
        except BaseException:  # Ctrl-C too
            for source, destination in reversed(done):
                destination.rename(source)
            raise
        return
    if target.exists():
        shutil.copymode(target, new)
    new.replace(target)


def _remove(folder: Path) -> None:
    """Remove a folder, with retries, since another thread may still write there; it fails once the folder is gone."""
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)
