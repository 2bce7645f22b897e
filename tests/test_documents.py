"""What the documents tell people to type does what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.cases import CASES

ROOT = Path(__file__).parent.parent


def test_every_benchmark_has_its_line() -> None:
    (table,) = re.findall(r"## Checking and measuring\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == CASES


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / "README.md", ROOT / "tests/README.md", ROOT / ".ci/run", *(ROOT / "docs").glob("*.md")):
        if path.name != "removed.md":
            assert set(re.findall(r"(?:`|^ *)make ([a-z-]+)", path.read_text(), re.MULTILINE)) <= targets, path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_the_certificates_that_the_documents_name_are_made_by_their_commands(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```\n(openssl .*?)```", (ROOT / "docs/security.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    named = set(re.findall(r"[\w-]+\.(?:pem|key)\b", (ROOT / "README.md").read_text()))
    assert {"me.pem", "me.key", "lab-ca.pem", "box.pem"} <= named <= {path.name for path in tmp_path.iterdir()}
    for certificate in ("box.pem", "me.pem"):
        verify = ["openssl", "verify", "-CAfile", "lab-ca.pem", certificate]
        subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)
