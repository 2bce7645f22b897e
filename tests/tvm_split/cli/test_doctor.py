from importlib import metadata

from tvm_split.cli.doctor import DISTRIBUTION, Check, Verdict, all_checks
from tvm_split.compiler.instruction_sets import target_text
from tvm_split.compiler.targets import host_target


def test_this_installation_is_fit(invoke_json):
    found = invoke_json("doctor")
    assert found["ok"] is True
    checks = {check["name"]: check for check in found["checks"]}
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
    failed = [check for check in all_checks() if check.verdict is Verdict.FAIL]
    assert [check.name for check in failed] == ["linker", "deployment"]
    assert all("broken" in check.found for check in failed)


def test_versions_are_compared_with_those_that_are_required(monkeypatch):
    installed = metadata.version
    others = {"torch": "2.11.0", "numpy": "1.26.4"}
    monkeypatch.setattr(metadata, "version", lambda name: others.get(name) or installed(name))
    checks = {check.name: check for check in all_checks()}
    assert (checks["packages"].verdict, checks["packages"].found) == (Verdict.FAIL, "numpy 1.26.4")
    for extra in ("torch", "demo"):
        assert (checks[f"extra {extra}"].verdict, checks[f"extra {extra}"].found) == (Verdict.WARN, "torch 2.11.0")
        assert "pip install 'torch" in checks[f"extra {extra}"].advice
    assert checks["extra onnx"].verdict is Verdict.OK


def test_every_extra_for_users_is_checked():
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra")
    named = {check.name.removeprefix("extra ") for check in all_checks() if check.name.startswith("extra ")}
    assert named == set(extras) - {"development", "frameworks"}
