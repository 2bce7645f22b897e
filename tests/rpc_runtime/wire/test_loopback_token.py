"""The token of a worker on loopback: who finds it, and who does not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.wire.loopback_token import find_token, new_token, published
from tests.helpers.rpc_runtime.worker_process import ROOT, STATE_VARIABLE


def test_the_token_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    token = new_token()
    assert new_token() != token
    with published(token, "127.0.0.1:7001") as file:
        expected = replace(token, file=file)
        assert find_token("127.0.0.1:7001") == find_token("localhost:7001") == expected
        for other in ("127.0.0.1:7002", "[::1]:7001", "127.0.0.2:7001", "box.lab.example:7001", "192.0.2.1:7001"):
            assert find_token(other) is None
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        assert token.text not in repr(expected)
    assert find_token("127.0.0.1:7001") is None


def test_a_token_of_somebody_else_is_no_token_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    with published(new_token(), "127.0.0.1:7001") as file:
        monkeypatch.setenv(STATE_VARIABLE, str(file))  # no folder
        assert find_token("127.0.0.1:7001") is None
        monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
        file.unlink()
        file.mkdir()  # what cannot be read, whoever runs this
        with pytest.raises(InputError, match="cannot read the token file"):
            find_token("127.0.0.1:7001")
        file.rmdir()


def test_a_folder_that_others_may_write_to_keeps_no_token(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(shared))
    with published(new_token(), "127.0.0.1:7001"):
        shared.chmod(0o777)
        with pytest.raises(InputError, match=str(shared)):
            find_token("127.0.0.1:7001")
    with pytest.raises(InputError, match=str(shared)), published(new_token(), "127.0.0.1:7001"):
        pass


def test_a_user_without_a_home_gets_one_line() -> None:
    code = (
        "import os; from rpc_runtime.wire.loopback_token import find_token, published, new_token\n"
        "os.setuid(54321)\n"
        "print(find_token('127.0.0.1:7001'))\n"
        "with published(new_token(), '127.0.0.1:7001'): pass"
    )
    variables = {name: value for name, value in os.environ.items() if name not in (STATE_VARIABLE, "HOME")}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, cwd=ROOT)
    if "PermissionError: [Errno 1]" in result.stderr:
        pytest.skip("only root may become a user without a home")
    assert result.stdout == "None\n"
    assert "cannot keep a token in the home of this user (it has none)" in result.stderr
