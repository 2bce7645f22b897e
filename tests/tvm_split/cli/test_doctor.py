from importlib import metadata

from tvm_split.cli.doctor import Check, Verdict, all_checks
from tvm_split.compiler.targets import host_target, target_text


def test_this_installation_is_fit(invoke_json):
    report = invoke_json("doctor")
    assert report["ok"] is True
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("processor", "memory", "deployment"):
        assert checks[name]["verdict"] == "ok"
    assert target_text(host_target(1)) in checks["processor"]["found"]


def test_a_failure_is_said_with_what_to_do(invoke, monkeypatch):
    checks = [Check("linker", Verdict.FAIL, "none", "install gcc"), Check("cores", Verdict.OK, "2")]
    monkeypatch.setattr("tvm_split.cli.doctor.all_checks", lambda: iter(checks))
    text = invoke("doctor", code=1).stdout
    assert "fail linker: none" in text
    assert "→ install gcc" in text


def test_a_check_that_raises_is_a_failure(monkeypatch):
    def no_linker():
        raise RuntimeError("broken")

    monkeypatch.setattr("tvm.support.cc.get_cc", no_linker)
    (failed,) = [check for check in all_checks() if check.verdict is Verdict.FAIL]
    assert (failed.name, failed.found) == ("linker", "RuntimeError: broken")


def test_a_linker_that_does_not_exist_is_a_failure(invoke_json, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: "/nonexistent/g++")
    checks = {check["name"]: check for check in invoke_json("doctor", code=1)["checks"]}
    assert (checks["linker"]["verdict"], checks["linker"]["found"]) == ("fail", "/nonexistent/g++ does not exist")


def test_versions_are_compared_with_those_that_are_required(monkeypatch):
    installed = metadata.version
    versions = {"torch": "2.11.0", "numpy": "1.26.4"}

    def version(name):
        if name == "lz4":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or installed(name)

    monkeypatch.setattr(metadata, "version", version)
    checks = {check.name: check for check in all_checks()}
    assert (checks["packages"].verdict, checks["packages"].found) == (Verdict.FAIL, "numpy 1.26.4")
    assert (checks["extra torch"].verdict, checks["extra torch"].found) == (Verdict.WARN, "torch 2.11.0")
    assert "pip install 'torch" in checks["extra torch"].advice
    assert "extra onnx" not in checks
    assert checks["extras"].verdict is Verdict.OK
    assert "codecs" in checks["extras"].found.partition(": ")[2].split(", ")
