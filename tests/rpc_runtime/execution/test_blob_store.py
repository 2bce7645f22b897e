"""Blobs are verified, shared between processes, and never removed while a store uses them."""

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rpc_runtime.errors import BlobError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.program.specs import BlobSpec
from tests.helpers.empty_root import OUTSIDE, can_make_roots
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS


def spec(content: bytes) -> BlobSpec:
    return BlobSpec(hashlib.sha256(content).hexdigest(), len(content))


def put(store: BlobStore, content: bytes) -> BlobSpec:
    blob = spec(content)
    store.write(blob, [content[:3], content[3:]])
    return blob


@pytest.mark.parametrize("content", [b"hellO", b"hell", b"hello!"])
def test_other_content_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(BlobError):
        store.write(spec(b"hello"), [content])
    assert store.pin("d", [spec(b"hello")])
    assert not list((tmp_path / "temporary").iterdir())


def test_a_damaged_blob_is_missing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob = put(store, b"hello")
    store.path(blob).write_bytes(b"hel")
    assert store.pin("d", [blob]) == (blob,)
    put(store, b"hello")
    store.path(blob).write_bytes(b"jello")
    with pytest.raises(BlobError, match="changed"):
        store.read(blob)
    assert store.pin("d", [blob]) == (blob,)


def test_the_count_is_not_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("17")
    BlobStore(tmp_path / "store").close()
    for replace in (lambda held: held.symlink_to(elsewhere), os.mkfifo, Path.mkdir):
        held = tmp_path / "store" / "held"
        held.unlink()
        replace(held)
        store = BlobStore(tmp_path / "store")
        assert bytes(store.read(put(store, b"hello"))) == b"hello"
    assert elsewhere.read_text() == "17"


def test_a_wrong_size_removes_no_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob = put(store, b"hello")
    wrong = BlobSpec(blob.sha256, 6)
    assert store.pin("other", [wrong]) == (wrong,)
    for call in (lambda: store.read(wrong), lambda: store.write(wrong, [b"hello"])):
        with pytest.raises(BlobError, match="has 5 bytes, and the caller says that it has 6"):
            call()
    assert store.read(blob).tobytes() == b"hello"


def test_a_removed_folder_is_made_again_with_the_pins_but_not_to_release_them(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store, second_store = BlobStore(folder, 10), BlobStore(folder, 10)
    blob = put(store, b"aaaa")
    shutil.rmtree(folder)
    store.unpin("d")
    assert not folder.exists()
    assert store.pin("d", [blob]) == (blob,)
    put(store, b"aaaa")
    with pytest.raises(BlobError, match="raise its limit"):
        put(second_store, b"bbbbbbb")
    shutil.rmtree(folder)
    store.close()
    assert not folder.exists()
    folder.write_text("in the way")
    for call in (
        lambda: put(second_store, b"hello"),
        lambda: second_store.pin("d", [blob]),
        lambda: second_store.unpin("d"),
    ):
        with pytest.raises(
            BlobError, match=rf"cannot keep blobs in {folder} \(.*\): name another folder with the worker's --cache$"
        ):
            call()


def test_the_least_recently_used_blob_is_removed_first(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, limit_bytes=10)
    old, new = put(store, b"aaaa"), put(store, b"bbbb")
    os.utime(store.path(old), (1, 1))
    third = put(store, b"cccc")
    assert store.pin("d", [old, new, third]) == (old,)


@pytest.mark.skipif(not can_make_roots(), reason="mounts in a namespace of its own")
def test_a_full_disk_is_named_and_not_a_limit(tmp_path: Path) -> None:
    """A limit that is larger than the disk, or none, is not what has to change; room that is made counts at once."""
    code = """
import contextlib, hashlib, pathlib, sys
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.program.specs import BlobSpec
folder = pathlib.Path(sys.argv[1]) / "cache"
content = bytes(1 << 20)
blob = BlobSpec(hashlib.sha256(content).hexdigest(), len(content))
for limit in (None, 1 << 40):
    store = BlobStore(folder, limit)
    filler = folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    try:
        store.write(blob, [content])
    except Exception as error:
        print(error)
    filler.unlink()
    store.write(blob, [content])
    store.path(blob).unlink()
"""
    mount = f'mount -t tmpfs -o size=4m tmpfs {tmp_path}; exec "$@"'
    command = [*OUTSIDE, "unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, ended.stderr
    for line in lines:
        assert line.startswith(f"cannot keep blobs in {tmp_path / 'cache'} (")
        assert line.endswith("): make room there")
    needed, free, limit = re.search(r"needs (\d+) bytes, and (\d+) are free, .* may take (\d+)", lines[0]).groups()
    assert int(needed) > min(int(free), int(limit))


def test_a_blob_that_another_store_uses_stays(tmp_path: Path) -> None:
    first, second = BlobStore(tmp_path, 10), BlobStore(tmp_path, 10)
    used = put(first, b"aaaa")
    first.pin("d", [used])
    os.utime(first.path(used), (1, 1))
    second_blob = put(second, b"bbbb")
    put(second, b"cccc")
    assert first.read(used).tobytes() == b"aaaa"
    assert second.pin("e", [second_blob]) == (second_blob,)
    with pytest.raises(BlobError, match="raise its limit"):
        put(second, b"ddddddd")
    first.close()
    put(second, b"ddddddd")
    assert second.pin("e", [used]) == (used,)


def test_pins_end_with_their_process_whatever_other_users_do(tmp_path: Path) -> None:
    """Another user who can read a file can lock it."""
    code = (
        "import sys; from pathlib import Path; from rpc_runtime.execution.blob_store import BlobStore\n"
        "from rpc_runtime.program.specs import BlobSpec\n"
        "store = BlobStore(Path(sys.argv[1]), 10); store.pin('d', [BlobSpec(sys.argv[2], 4)]); "
        "print(flush=True); input()"
    )
    blob = put(BlobStore(tmp_path, 10), b"aaaa")
    with contextlib.ExitStack() as until_end:
        command = [sys.executable, "-c", code, tmp_path, blob.sha256]
        owner = until_end.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, umask=0o022, cwd=ROOT)
        )
        assert owner.stdout is not None
        assert owner.stdout.readline()
        readable = [path for path in (tmp_path / "pins").iterdir() if path.stat().st_mode & 0o004]
        files = [until_end.enter_context(path.open("rb")) for path in readable]
        owner.kill()
        owner.wait()
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX)
        put(BlobStore(tmp_path, 10), b"bbbbbbbb")


def _write_many(folder: Path) -> None:
    store = BlobStore(folder, 4000)
    for number in range(30):
        content = bytes([number]) * 400
        blob = spec(content)
        store.pin("d", [blob])
        store.write(blob, [content])
        assert store.read(blob).tobytes() == content
        store.unpin("d")
    store.close()


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_many, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sum(path.stat().st_size for path in (tmp_path / "blobs").glob("*/*")) <= 4000
