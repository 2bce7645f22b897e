"""The line of README's table that needs TensorFlow."""

from pathlib import Path

import pytest

from tests.helpers.frontends.keras_networks import convolutions
from tests.helpers.readme_table import run


def test_from_a_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convolutions().export(tmp_path / "saved_model", verbose=False)
    assert "machine-a" in run("a SavedModel of TensorFlow")
