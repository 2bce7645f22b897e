"""Stored measurements are reused, survive other writers, and are measured again if a file is damaged."""

import fcntl
import os
import random
import re
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tests.helpers.mutations import mutated
from tvm_split.errors import CacheWarning
from tvm_split.profiling.machine_times import CachedTime
from tvm_split.profiling.store import Store, store_files

MACHINE = {"hostname": "box", "machine": "machine-a", "threads": 1}
KIND = TypeAdapter(CachedTime)
ENTRY = CachedTime(2e-3, 1_700_000_000.0)


def test_what_is_kept_is_found_again_for_the_same_machine(tmp_path: Path) -> None:
    Store(tmp_path, MACHINE).put({"k": ENTRY})
    again = Store(tmp_path, MACHINE)
    assert (again.get("k", KIND), again.get("other", KIND)) == (ENTRY, None)
    for change in ({"threads": 2}, {"hostname": "desk"}, {"machine": "machine-b"}, {"tvm": "0.28"}):
        assert Store(tmp_path, {**MACHINE, **change}).get("k", KIND) is None


def test_writers_keep_each_others_entries(tmp_path: Path) -> None:
    caches = [Store(tmp_path, MACHINE) for _ in range(8)]
    with ThreadPoolExecutor(len(caches)) as threads:
        list(threads.map(lambda number: caches[number].put({str(number): ENTRY}), range(len(caches))))
    store = Store(tmp_path, MACHINE)
    assert [store.get(str(number), KIND) for number in range(len(caches))] == [ENTRY] * len(caches)
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{}",
        b"[" * 100_000,
        b'{"format": "tvm-split measurements", "version": 4, "entries": {"k": 7}}',
        b'{"format": "tvm-split measurements", "version": 4, "entries": {"k": {"seconds": 1}}}',
        b'{"format": "tvm-split measurements", "version": 4, "entries": {"k": {"seconds": NaN, "measured_at": 0}}}',
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path, MACHINE).put({"k": ENTRY})
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    with pytest.warns(CacheWarning, match=re.escape(str(path))):  # noqa: PT031
        damaged = Store(tmp_path, MACHINE)
        assert damaged.get("k", KIND) is None
        assert [store.path for store in store_files(tmp_path)] == [path]
        damaged.put({"k": ENTRY})
    assert Store(tmp_path, MACHINE).get("k", KIND) == ENTRY


def test_no_change_of_a_file_changes_a_measurement(tmp_path: Path) -> None:
    Store(tmp_path, MACHINE).put({"k": ENTRY, "l": CachedTime(3e-3, 1.0)})
    (path,) = tmp_path.glob("*.json")
    whole, source = path.read_bytes(), random.Random(0)
    digit = whole.replace(b"0.002", b"0.003")
    Store(tmp_path, {**MACHINE, "machine": "slow"}).put({"k": CachedTime(9.0, 1.0)})
    (others,) = set(tmp_path.glob("*.json")) - {path}
    contents = [digit, others.read_bytes(), *(whole[:end] for end in (0, 1, len(whole) // 2, -1))]
    for content in (*contents, *(mutated(whole, source) for _ in range(50))):
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            assert Store(tmp_path, MACHINE).get("k", KIND) in (None, ENTRY)
    path.write_bytes(digit)
    assert not any(store.measured_at for store in store_files(tmp_path) if store.path == path)


def test_nothing_is_from_the_future(tmp_path: Path) -> None:
    Store(tmp_path, MACHINE).put({"k": CachedTime(1.0, time.time() + 1e6)})
    cached = Store(tmp_path, MACHINE).get("k", KIND)
    assert cached is not None
    assert cached.measured_at <= time.time()


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning) as caught:  # noqa: PT031
        for folder in (tmp_path / "file", None):
            store = Store(folder, MACHINE)
            store.put({"k": ENTRY})
            assert store.get("k", KIND) == ENTRY
            assert Store(folder, MACHINE).get("k", KIND) is None
    (text,) = (str(warning.message) for warning in caught)  # once, although several stores use the folder
    assert text.partition("): ")[2] == "name another folder with $TVM_SPLIT_CACHE"


def test_what_others_may_have_written_is_not_believed(shared: Path) -> None:
    folder = shared / "measurements"
    Store(folder, MACHINE).put({"k": ENTRY})
    shared.chmod(0o777)
    with pytest.warns(CacheWarning, match=re.escape(str(shared))):
        store = Store(folder, MACHINE)
    assert store.get("k", KIND) is None
    store.put({"k": ENTRY})
    assert store.get("k", KIND) == ENTRY
    shared.chmod(0o755)
    assert Store(folder, MACHINE).get("k", KIND) == ENTRY


def test_another_user_who_can_read_the_folder_keeps_nobody_waiting(tmp_path: Path) -> None:
    Store(tmp_path, MACHINE).put({"k": ENTRY})
    tmp_path.chmod(0o755)
    readable = [path for path in (tmp_path, *tmp_path.iterdir()) if path.stat().st_mode & 0o004]
    with ThreadPoolExecutor(1) as threads, held(readable):
        put = threads.submit(Store(tmp_path, MACHINE).put, {"l": ENTRY})
        assert not wait([put], 60).not_done
    assert Store(tmp_path, MACHINE).get("l", KIND) == ENTRY


def test_a_lock_that_is_never_released_is_told_and_costs_only_time(tmp_path: Path) -> None:
    Store(tmp_path, MACHINE).put({"k": ENTRY})
    store = Store(tmp_path, MACHINE, lock_seconds=0.1)
    other_stores = [Store(tmp_path, {"machine": letter}, lock_seconds=3600) for letter in "ab"]
    with held([path for path in tmp_path.iterdir() if path.suffix != ".json"]):
        with pytest.warns(CacheWarning, match=f"{re.escape(str(tmp_path))}.*fuser"):
            store.put({"l": ENTRY})
        for other_store in (*other_stores, Store(tmp_path, {"machine": "c"}, lock_seconds=3600)):
            other_store.put({"l": ENTRY})  # does not wait as well
    assert store.get("l", KIND) == store.get("k", KIND) == ENTRY


@contextmanager
def held(paths: list[Path]) -> Iterator[None]:
    """Lock these files and folders, as another process would."""
    with ExitStack() as until_end:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            until_end.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
