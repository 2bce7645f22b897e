"""The folder of tuned kernels: what another user may have written there becomes no code of ours."""

from pathlib import Path

import pytest

from rpc_runtime.files import CACHE_VARIABLE
from tvm_split.compiler.tuning_folder import DATABASE_VARIABLE, open_database, usable_folder
from tvm_split.errors import TuningError


def test_the_default_folder_is_this_users_alone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, str(shared / "cache"))
    assert open_database(None) is None
    assert not (shared / "cache").exists()
    folder = usable_folder(None)
    assert folder.stat().st_mode & 0o077 == 0
    assert open_database(None) is not None
    shared.chmod(0o777)
    for use in (open_database, usable_folder):
        with pytest.raises(TuningError, match=str(shared)):
            use(None)


def test_a_default_folder_that_cannot_be_entered_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, "/" + 300 * "x")  # longer than a name may be
    assert open_database(None) is None


def test_a_named_folder_is_its_users_choice(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.chmod(0o777)
    assert open_database(shared) is not None
    monkeypatch.setenv(DATABASE_VARIABLE, str(shared))
    assert open_database(None) is not None
    assert usable_folder(None) == shared
