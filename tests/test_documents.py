"""What the documents tell people to type does what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_every_check_and_benchmark_has_its_line() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (plain,) = re.findall(r"^PLAIN := (.*)$", makefile, re.MULTILINE)
    targets = [*plain.split(), *re.findall(r"^((?:check|bench|prove)-[\w-]+):", makefile, re.MULTILINE)]
    (table,) = re.findall(r"## Checking and measuring\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
    assert sorted(re.findall(r"^\| `make ([\w-]+)` \|", table, re.MULTILINE)) == sorted(targets)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_the_certificates_that_the_documents_name_are_made_by_their_commands(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```\n(openssl .*?)```", (ROOT / "docs/security.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    named = set(re.findall(r"[\w-]+\.(?:pem|key)\b", (ROOT / "README.md").read_text()))
    assert {"me.pem", "me.key", "lab-ca.pem", "box.pem"} <= named <= {path.name for path in tmp_path.iterdir()}
    for certificate in ("box.pem", "me.pem"):
        verify = ["openssl", "verify", "-CAfile", "lab-ca.pem", certificate]
        subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)
