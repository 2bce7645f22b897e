"""Fixtures of the compiler's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder of this test alone, which is empty."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(folder))
    return folder
