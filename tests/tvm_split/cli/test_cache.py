import time

import pytest

from tvm_split.profiling.machine_times import CachedTime
from tvm_split.profiling.store import Store, default_folder


@pytest.fixture(autouse=True)
def _kept(monkeypatch, tmp_path):
    """Times of two machines and a damaged file."""
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path))
    entry = CachedTime(1e-3, time.time() - 7300)
    for name in ("desk", "box"):
        store = Store(default_folder(), {"machine": name, "hostname": "lab", "threads": 2})
        store.put({"first": entry, "second": entry})
    (default_folder() / "damaged.json").write_text("[]")


def test_what_is_kept_is_shown(invoke, invoke_json):
    text = invoke("cache", "show").stdout
    assert "desk on lab, threads: 2: 2 measurements, up to 2 hours old" in text
    assert "damaged.json: cannot be read" in text
    assert f"kept in {default_folder()}" in text
    assert "tuned kernels: " in text
    listing = invoke_json("cache", "show")
    assert sorted(store.get("machine", "") for store in listing["measurements"]) == ["", "box", "desk"]


def test_clearing_removes_measurements_and_what_was_compiled(invoke, tmp_path):
    (tmp_path / "mine").write_text("")
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "key").write_text("{}")
    assert "results of compiling: 1 kept" in invoke("cache", "show").stdout
    assert "removed in" in invoke("cache", "clear").stdout
    assert list(default_folder().glob("*.json")) == []
    assert list((tmp_path / "compiled").iterdir()) == []
    assert (tmp_path / "mine").exists()
    assert "measurements: 0 B kept" in invoke("cache", "show").stdout


def test_wrong_use(invoke):
    assert "show" in invoke("cache", "burn", code=2).stderr
