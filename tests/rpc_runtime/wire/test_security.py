"""Tokens and TLS files from users: invalid ones are rejected with one line."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.wire.security import (
    TOKEN_VARIABLE,
    TlsFiles,
    Token,
    find_token,
    new_token,
    pem_content,
    published,
    token_from,
)
from rpc_runtime.wire.tokens import Tokens
from tests.helpers.empty_root import OUTSIDE, can_make_roots
from tests.helpers.rpc_runtime.worker_process import ROOT, STATE_VARIABLE

TOKEN = Token("open-sesame")


@pytest.mark.parametrize("text", ["", "open sesame", "open\nsesame", "s\u00e9same", "\x7f", "a\0b"])
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(InputError, match="printable ASCII letters without blanks"):
        Token(text)


def test_a_file_comes_before_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" open-sesame\n")
    assert token_from(file, {TOKEN_VARIABLE: "other"}) == Token("open-sesame", file)
    assert token_from(None, {TOKEN_VARIABLE: " open-sesame "}) == TOKEN
    assert token_from(None, {TOKEN_VARIABLE: " "}) is None
    assert token_from(None, {}) is None


@pytest.mark.parametrize(
    ("of_file", "of_folder", "accepted"),
    [
        (0o644, 0o755, False),
        (0o604, 0o711, False),
        (0o644, 0o700, True),
        (0o644, 0o750, True),
        (0o440, 0o755, True),
        (0o600, 0o777, True),
    ],
)
def test_a_secret_that_every_user_can_read(shared: Path, of_file: int, of_folder: int, accepted: bool) -> None:
    folder = shared / "folder"
    folder.mkdir()
    token, key, link = folder / "token", folder / "key", shared / "link"
    token.write_text("open-sesame")
    key.write_text("-----BEGIN PRIVATE KEY-----")
    link.symlink_to(token)
    for path in (token, key):
        path.chmod(of_file)
    folder.chmod(of_folder)
    for read, path in ((token_from, token), (token_from, link), (partial(pem_content, what="private key"), key)):
        with (
            nullcontext() if accepted else pytest.raises(InputError, match=rf"every user .*{path}: `chmod 600 {path}`")
        ):
            assert read(path)


@pytest.mark.skipif(not can_make_roots(), reason="mounts in a namespace of its own")
def test_a_secret_on_a_read_only_mount(shared: Path) -> None:
    """Kubernetes (0444, 0440) and compose mount secrets so; in the container, no other user reads them."""
    (shared / "token").write_text("open-sesame")
    (shared / "token").chmod(0o444)
    code = "import sys, pathlib, rpc_runtime.wire.security as s; print(s.token_from(pathlib.Path(sys.argv[1]), {}))"
    for options, word in (("remount,ro,bind", "Token("), ("remount,rw,bind", "InputError")):
        lines = f'mount --bind {shared} {shared}; mount -o {options} {shared}; exec "$@"'
        command = [*OUTSIDE, "unshare", "--mount", "sh", "-c", lines, "sh", sys.executable, "-c", code]
        ended = subprocess.run([*command, str(shared / "token")], capture_output=True, text=True, check=False, cwd=ROOT)
        assert word in ended.stdout + ended.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the token file .*nowhere: No such file"):
        token_from(tmp_path / "nowhere", {})
    os.mkfifo(tmp_path / "pipe")
    for read in (token_from, pem_content):
        with pytest.raises(InputError, match=r"cannot read the .* file .*pipe: it is a pipe, socket or device"):
            read(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"the token file .*binary is not a text file"):
        token_from(tmp_path / "binary", {})
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="one or more"):
        token_from(tmp_path / "empty", {})
    with pytest.raises(InputError, match=r"cannot read the TLS file .*nowhere: No such file"):
        pem_content(tmp_path / "nowhere")
    with pytest.raises(InputError, match="both a certificate and its key"):
        TlsFiles(certificate=tmp_path / "empty").contents()
    with pytest.raises(InputError, match=r"empty holds no certificate in PEM"):  # gRPC would end the process
        TlsFiles(tmp_path / "empty").channel_credentials()


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [
        ([("authorization", "Bearer open-sesame")], True),
        ([("other", "x"), ("authorization", b"Bearer open-sesame")], True),
        ([("authorization", "Bearer wrong"), ("authorization", "Bearer open-sesame")], True),
        ([("authorization", "Bearer open-sesam")], False),
        ([("authorization", "open-sesame")], False),
        ([("authorization", "Bearer open-sesame\ud800")], False),
        ([("other", "Bearer open-sesame")], False),
        ([], False),
    ],
)
def test_who_knows_a_token(metadata: list[tuple[str, str | bytes]], accepted: bool) -> None:
    assert (Tokens(TOKEN).caller(metadata) is not None) is accepted


def test_the_token_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    token = new_token()
    assert new_token() != token
    with published(token, "127.0.0.1:7001") as file:
        expected = replace(token, file=file)
        assert find_token("127.0.0.1:7001") == find_token("localhost:7001") == expected
        for address in ("127.0.0.1:7002", "[::1]:7001", "127.0.0.2:7001", "box.lab.example:7001", "192.0.2.1:7001"):
            assert find_token(address) is None
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        assert token.text not in repr(expected)
    assert find_token("127.0.0.1:7001") is None


def test_a_folder_that_others_may_write_to_keeps_no_token(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(shared))
    with published(new_token(), "127.0.0.1:7001"):
        shared.chmod(0o777)
        with pytest.raises(InputError, match=str(shared)):
            find_token("127.0.0.1:7001")
    with pytest.raises(InputError, match=str(shared)), published(new_token(), "127.0.0.1:7001"):
        pass
