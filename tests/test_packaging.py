"""What is installed beside other people's packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tvm_split", "relay_passes", "schedules", "rpc_runtime", "tests")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "tvm_split_command.py")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--wheel-dir", tmp_path], cwd=source, check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_nothing_generic_is_installed(names: set[str]) -> None:
    (about,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"tvm_split", "tvm_split_command.py", about}
    assert about.startswith("tvm_split-")
    for room in FOLDERS[1:4]:
        assert {f"tvm_split/{path.relative_to(ROOT)}" for path in (ROOT / room).rglob("*.py")} <= names


@pytest.mark.parametrize("package", ["tvm_split", *(f"tvm_split/{room}" for room in FOLDERS[1:4])])
def test_type_checkers_read_the_installed_packages(names: set[str], package: str) -> None:
    assert f"{package}/py.typed" in names
