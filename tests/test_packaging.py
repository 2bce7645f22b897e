"""What is installed beside other people's packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("tvm_split", "relay_passes", "schedules", "rpc_runtime", "tests")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "tvm_split_command.py")


def test_nothing_generic_is_installed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--wheel-dir", tmp_path], cwd=source, check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {
        "tvm_split",
        "tvm_split_command.py",
        wheel.name.split("-py3")[0],
    }
    for room in FOLDERS[1:4]:
        assert {f"tvm_split/{path.relative_to(ROOT)}" for path in (ROOT / room).rglob("*.py")} <= set(names)
