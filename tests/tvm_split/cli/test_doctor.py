import platform
import time
from importlib import metadata

import pytest

from rpc_runtime.hardware import cpu_features
from tvm_split.cli.doctor import all_checks
from tvm_split.compiler.targets import host_target, target_text
from tvm_split.display.findings import Level
from tvm_split.profiling.machine_times import CachedTime
from tvm_split.profiling.store import Store, default_folder


def test_this_installation_is_fit(invoke_json):
    report = invoke_json("doctor")
    assert report["ok"] is True
    checks = {check["check"]: check for check in report["findings"]}
    is_slow = platform.machine() == "x86_64" and "avx2" not in cpu_features()
    for name, level in (("processor", "warning" if is_slow else "ok"), ("memory", "ok"), ("deployment", "ok")):
        assert checks[name]["level"] == level
    assert target_text(host_target(1)) in checks["processor"]["found"]


def test_a_failure_is_said_with_what_to_do(invoke, monkeypatch):
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: "/nonexistent/g++")
    text = " ".join(invoke("doctor", code=1).stdout.split())
    assert "linker problem /nonexistent/g++ does not exist → set CXX to a compiler" in text


def test_versions_are_compared_with_those_that_are_required(monkeypatch):
    installed = metadata.version
    versions = {"torch": "2.11.0", "numpy": "1.26.4"}

    def version(name):
        if name == "lz4":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or installed(name)

    monkeypatch.setattr(metadata, "version", version)
    checks = {check.check: check for check in all_checks()}
    assert (checks["packages"].level, checks["packages"].found) == (Level.PROBLEM, "numpy 1.26.4")
    assert (checks["extra torch"].level, checks["extra torch"].found) == (Level.WARNING, "torch 2.11.0")
    assert "pip install 'torch" in checks["extra torch"].remedy
    assert "extra onnx" not in checks
    assert checks["extras"].level is Level.OK
    assert "codecs" in checks["extras"].found.partition(": ")[2].split(", ")


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
    for folder in ("compiled", "kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "key").write_text("{}")
    assert "results of compiling: 1 kept" in invoke("cache", "show").stdout
    assert "removed in" in invoke("cache", "clear").stdout
    assert list(default_folder().glob("*.json")) == []
    assert not any(list((tmp_path / folder).iterdir()) for folder in ("compiled", "kernels"))
    assert (tmp_path / "mine").exists()
    assert "measurements: 0 B kept" in invoke("cache", "show").stdout


def test_folders_and_broken_links_are_no_reason_to_fail(invoke, tmp_path):
    (default_folder() / "gone.json").symlink_to(tmp_path / "nowhere")
    for folder in (default_folder() / "folder.json", tmp_path / "compiled" / "folder", tmp_path / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "blobs" / "gone").symlink_to(tmp_path / "nowhere")
    assert "gone.json: cannot be read" in invoke("cache", "show").stdout
    invoke("cache", "clear")
    assert (tmp_path / "compiled" / "folder").is_dir()
    assert [path.name for path in default_folder().glob("*.json")] == ["folder.json"]


def test_wrong_use(invoke):
    assert "show" in invoke("cache", "burn", code=2).stderr
