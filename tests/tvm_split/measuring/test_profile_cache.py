from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tvm_split.measuring.profile_cache import CachedTime, ProfileCache, default_folder, entry_key

MACHINE = {"hostname": "box", "machine": "machine-a", "threads": 1}
ENTRY = CachedTime(2e-3, 1e-3, 1_700_000_000.0)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    ProfileCache(tmp_path, MACHINE).put({"k": ENTRY})
    again = ProfileCache(tmp_path, MACHINE)
    assert again.get("k") == ENTRY
    assert again.get("other") is None
    assert not again.notes


def test_machines_do_not_share(tmp_path: Path) -> None:
    ProfileCache(tmp_path, MACHINE).put({"k": ENTRY})
    for change in ({"threads": 2}, {"hostname": "desk"}, {"machine": "machine-b"}, {"tvm": "0.28"}):
        assert ProfileCache(tmp_path, {**MACHINE, **change}).get("k") is None


def test_writers_keep_each_others_entries(tmp_path: Path) -> None:
    caches = [ProfileCache(tmp_path, MACHINE) for _ in range(8)]
    with ThreadPoolExecutor(len(caches)) as threads:
        list(threads.map(lambda number: caches[number].put({str(number): ENTRY}), range(len(caches))))
    found = ProfileCache(tmp_path, MACHINE)
    assert [found.get(str(number)) for number in range(len(caches))] == [ENTRY] * len(caches)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"format": "tvm-split profile", "version": 1, "machine": {}, "times": {"k": {"seconds": -1}}}',
        b'{"format": "tvm-split profile", "version": 1, "machine": {}, "times": {"k": {"seconds": NaN, '
        b'"best_seconds": 1, "measured_at": 0}}}',
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, content: bytes) -> None:
    ProfileCache(tmp_path, MACHINE).put({"k": ENTRY})
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    damaged = ProfileCache(tmp_path, MACHINE)
    assert damaged.get("k") is None
    assert [str(path) in note and "measured again" in note for note in damaged.notes] == [True]
    damaged.put({"k": ENTRY})
    assert ProfileCache(tmp_path, MACHINE).get("k") == ENTRY


def test_another_versions_file_is_written_over(tmp_path: Path) -> None:
    ProfileCache(tmp_path, MACHINE).put({"k": ENTRY})
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))
    old = ProfileCache(tmp_path, MACHINE)
    assert old.get("k") is None
    assert not old.notes


def test_nothing_is_from_the_future(tmp_path: Path) -> None:
    ProfileCache(tmp_path, MACHINE).put({"k": CachedTime(1.0, 1.0, time.time() + 1e6)})
    found = ProfileCache(tmp_path, MACHINE).get("k")
    assert found is not None
    assert found.measured_at <= time.time()


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "profiles"
    monkeypatch.delenv("TVM_SPLIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "tvm-split" / "profiles"


def test_a_key_is_what_it_is_made_of() -> None:
    assert entry_key(a=1, b=[2]) == entry_key(b=[2], a=1) != entry_key(a=1, b=[3])
