"""``certs`` and ``token``, and workers that use what they write."""

import json
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="makes certificates")


def test_certificates_are_made_renewed_and_shown_by_status(invoke, invoke_json, start_process, tmp_path: Path) -> None:
    lab, words = tmp_path / "lab", ("certs", tmp_path / "lab", "--host", "box=localhost,127.0.0.1", "--client", "me")
    made = invoke_json(*words, "--days", "40")
    assert made == {"box": str(lab / "box.pem"), "me": str(lab / "me.pem")}
    files = {name: (lab / name).read_bytes() for name in ("lab-ca.pem", "lab-ca.key", "box.pem", "me.key")}
    assert {path.stat().st_mode & 0o777 for path in lab.iterdir()} == {0o600}
    for name, role in (("alice", "deploy"), ("bob", "observe")):
        secret = invoke("token", name, "--role", role, "--tokens", tmp_path / "tokens").stdout
        (tmp_path / f"{name}.token").write_text(secret)
    worker = start_process(
        *("worker", "--name", "box", "--listen", "127.0.0.1:0", "--cache", tmp_path / "cache", "--json"),
        *("--tls-certificate", lab / "box.pem", "--tls-key", lab / "box.key", "--tls-ca", lab / "lab-ca.pem"),
        *("--tokens", tmp_path / "tokens"),
    )
    address = json.loads(worker.stdout.readline())["address"]

    def status(token: str, code: int = 0) -> str:
        tls = f"tls_ca={lab}/lab-ca.pem&tls_certificate={lab}/me.pem&tls_key={lab}/me.key"
        result = invoke("status", "--cluster", f"at:{address}?token_file={tmp_path}/{token}.token&{tls}", code=code)
        return result.stdout + result.stderr

    assert "expires in 40 days" in status("alice")
    assert "expires in 40 days" in status("bob")
    invoke(*words, "--days", "80")
    assert (lab / "lab-ca.pem").read_bytes() == files["lab-ca.pem"]
    assert (lab / "box.pem").read_bytes() != files["box.pem"]
    assert "expires in 80 days" in status("alice")
    kept = [line for line in (tmp_path / "tokens").read_text().splitlines() if not line.startswith("alice ")]
    (tmp_path / "tokens").write_text("\n".join(kept))
    assert "the token of 'alice' was revoked" in status("alice", code=1)
    assert "expires in 80 days" in status("bob")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["certs", "lab"], "--host, --client: name the machines and people"),
        (["certs", "lab", "--client", "../me"], "1 to 64 letters for its files"),
        (["certs", "lab", "--client", "lab-ca"], "other than lab-ca"),
        (["certs", "lab", "--host", "box=b\u00fccher.example"], "cannot certify box at b\u00fccher.example"),
        (["token", "a b"], "1 to 64 letters, digits or any of ._@-"),
        (["token", "a", "--tokens", "nowhere/tokens"], "there is no folder 'nowhere'"),
    ],
)
def test_what_is_refused(invoke, tmp_path: Path, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)

    assert message in invoke(*words, code=2).stderr


def test_an_authority_is_never_replaced(invoke, tmp_path: Path) -> None:
    words = ("certs", tmp_path / "lab", "--client", "me")
    invoke(*words)
    before = (tmp_path / "lab/lab-ca.pem").read_bytes()
    (tmp_path / "lab/lab-ca.key").rename(tmp_path / "safe")
    assert "lab-ca.key: No such file" in invoke(*words, code=1).stderr
    (tmp_path / "lab/lab-ca.key").write_text("no key")
    assert "cannot certify me" in invoke(*words, code=2).stderr
    assert (tmp_path / "lab/lab-ca.pem").read_bytes() == before
