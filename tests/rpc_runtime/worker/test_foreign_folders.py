"""A second user of a worker's host, who may write to its folders: none of their code runs in the worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.files import CACHE_VARIABLE, WRITING
from tests.helpers.rpc_runtime.pipelines import open_on
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, double
from tests.helpers.rpc_runtime.worker_process import ROOT, Start, ready, start_worker

OTHER = 65534
"""A user, and a group, that is not the one of the tests."""
NOBODY = 2**32 - 1
"""The identity in entries of an access control list that name none: see acl(5)."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_is_swapped_in_after_it_was_verified_is_not_loaded(tmp_path: Path) -> None:
    source, hostile, loaded = (tmp_path / name for name in ("hostile.c", "hostile.so", "loaded"))
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void begin(void) "
        f'{{ fclose(fopen("{loaded}", "w")); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", hostile, source], check=True)
    with LocalWorkers([A], cache=tmp_path / "cache") as own, swapping(tmp_path / "cache/temporary", hostile):
        for columns in range(1, 6):
            maker = ProgramMaker(tmp_path / str(columns))
            x = maker.input("x", (2, columns))
            program = maker.program([maker.stage(f"s{columns}", A, [x], double)])
            batch = batches_for(program, 1)[0]
            with open_on(own, program, maker) as pipeline:
                np.testing.assert_array_equal(pipeline.run(batch)[0], 2 * batch[0])
    assert not loaded.exists()


@contextlib.contextmanager
def swapping(folder: Path, hostile: Path) -> Iterator[None]:
    """Inside, whatever appears in a folder is replaced, but for uploads: those are verified afterwards."""
    ended, copy = threading.Event(), hostile.with_suffix(".copy")

    def swap() -> None:
        while not ended.is_set():
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    if not path.name.startswith(WRITING) and not path.samefile(hostile):
                        copy.hardlink_to(hostile)
                        copy.replace(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_worker_refuses_a_cache_that_others_may_write_to(shared: Path, mode: int) -> None:
    cache = shared / "cache"
    cache.mkdir()
    cache.chmod(mode)
    assert_refused(start_worker(cache), cache)


def test_a_worker_refuses_a_cache_that_others_may_replace(shared: Path) -> None:
    shared.chmod(0o777)
    assert_refused(start_worker(shared / "cache"), shared)


def test_a_worker_refuses_a_cache_of_another_group(shared: Path) -> None:
    if os.geteuid():
        pytest.skip("needs a group of others, which root can give to a folder")
    os.chown(shared, 0, OTHER)
    shared.chmod(0o775)
    assert_refused(start_worker(shared / "cache"), shared)


@pytest.mark.parametrize("owned", ["cache", "parent", "link"])
def test_a_worker_refuses_a_cache_of_another_user(shared: Path, owned: str) -> None:
    if os.geteuid():
        pytest.skip("needs root, who can give a folder to another user")
    parent, cache, link = shared / "parent", shared / "parent/cache", shared / "link"
    cache.mkdir(parents=True)
    link.symlink_to(parent)
    other = {"cache": cache, "parent": parent, "link": link}[owned]
    os.chown(other, OTHER, OTHER, follow_symlinks=False)
    assert_refused(start_worker((link if owned == "link" else parent) / "cache"), other)


def test_a_worker_refuses_a_link_that_another_user_can_turn(shared: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, who can give a link to another user")
    shared.chmod(0o1777)  # as /tmp is
    target, foreign, own = shared / "target", shared / "foreign", shared / "own"
    target.mkdir()
    foreign.symlink_to("target")
    own.symlink_to(foreign)
    os.chown(foreign, OTHER, OTHER, follow_symlinks=False)
    assert_refused(start_worker(own / "cache"), foreign)


def test_a_worker_refuses_a_cache_to_which_a_list_admits_others(shared: Path) -> None:
    cache = shared / "cache"
    cache.mkdir(mode=0o700)
    entries = [(0x01, 7, NOBODY), (0x02, 7, OTHER), (0x04, 0, NOBODY), (0x10, 7, NOBODY), (0x20, 0, NOBODY)]
    access_list = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(cache, "system.posix_acl_access", access_list)
    except OSError:
        pytest.skip("needs a file system with access control lists")
    assert_refused(start_worker(cache), cache)


def test_a_worker_refuses_the_folder_that_the_variable_names(shared: Path) -> None:
    shared.chmod(0o777)
    command = [sys.executable, "-m", "rpc_runtime.worker"]
    environment = {**os.environ, CACHE_VARIABLE: str(shared / "own")}
    assert_refused(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment), shared)


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_what_a_worker_makes_is_its_users_alone(shared: Path, umask: int) -> None:
    shared.chmod(0o1777)  # as /tmp is
    cache = shared / "made/cache"
    process = start_worker(cache, "--json", within=["sh", "-c", f'umask {umask:o}; exec "$@"', "sh"])
    try:
        ready(process)
    finally:
        process.kill()
        process.communicate()
    for folder in (cache.parent, cache, *filter(Path.is_dir, cache.rglob("*"))):
        assert not folder.stat().st_mode & 0o077


def test_a_cache_below_a_folder_that_others_cannot_enter_is_used(shared: Path, start: Start) -> None:
    shared.chmod(0o700)
    volume = shared / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    ready(start("--json", "--cache", str(volume / "blobs")))


def assert_refused(process: subprocess.Popen[str], culprit: Path) -> None:
    """It ends at once with one line that names the folder."""
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert str(culprit) in line
    assert "chmod" in line
