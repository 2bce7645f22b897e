"""The commands and names in the documents exist and do what the text says."""

import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tvm_split
from rpc_runtime.worker.config import require_options
from tvm_split.cli.application import app, loaded, registry

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests/README.md",
    ROOT / "tests/helpers/toy_plugin/README.md",
)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", FENCE.sub("", path.read_text())):
        aim = (path.parent / target).resolve() if target else path
        assert aim.exists(), target
        assert not anchor or anchor in headings(aim), f"{target}#{anchor}"


def commands(path: Path) -> list[list[str]]:
    """The words of each `tvm-split` command line of a document, without comments."""
    text = path.read_text().replace("\\\n", " ")
    blocks = [block for match in FENCE.finditer(text) for block in match.group().splitlines()]
    inline = re.findall(r"(?<!`)`(tvm-split [^`]+)`", FENCE.sub("", text))
    lines = [
        line[line.index("tvm-split ") :] for line in (*blocks, *inline) if re.match(r" *(mpiexec .*)?tvm-split ", line)
    ]
    return [shlex.split(re.sub(r"\s[:>|].*", "", line.replace("\n", " ")), comments=True)[1:] for line in lines]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_named_source_file_exists(path: Path) -> None:
    if path.name in ("removed.md", "CHANGELOG.md"):
        return
    for name in re.findall(r"`([\w/]+\.py)`", path.read_text()):
        assert any(f"/{source}".endswith(f"/{name}") for source in sources()), name


@cache
def sources() -> frozenset[str]:
    folders = ("tvm_split", "relay_passes", "schedules", "rpc_runtime", "tests", "scripts", "examples")
    return frozenset(str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*.py"))


@cache
def options_of(command: str) -> frozenset[str]:
    named = [
        name for parameter in loaded(registry[command]).params for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    return frozenset(name for name in named if name.startswith("-"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_option_exists(path: Path) -> None:
    if path.name == "removed.md":
        return
    for words in commands(path):
        if not words or words[0] not in registry:
            assert not words or words[0].startswith("-") or words[0].isupper(), words
        elif words[0] == "worker":
            require_options(words[1:]) if "…" not in words else None
        else:
            used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert used <= options_of(words[0]), words


def test_the_public_names_that_documents_use_exist() -> None:
    for path in DOCUMENTS:
        if path.name != "removed.md":
            for name in re.findall(r"\btvm_split\.([A-Za-z]\w+)\b(?![/.])", path.read_text()):
                package = (ROOT / "tvm_split" / name).is_dir() or (ROOT / f"tvm_split/{name}.py").exists()
                assert package or name in tvm_split.__all__ or name in ENTRY_POINTS_AND_OPERATIONS, f"{path}: {name}"


ENTRY_POINTS_AND_OPERATIONS = {
    *("transports", "codecs", "strategies", "commands", "frontends", "launchers"),
    *("receive", "send", "schedule", "failure", "Control"),
}


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (*DOCUMENTS, ROOT / ".ci/run"):
        if path.name != "removed.md":
            assert set(re.findall(r"(?:`|^ *)make ([a-z-]+)", path.read_text(), re.MULTILINE)) <= targets, path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="verifies certificates with openssl")
def test_the_certificates_that_the_documents_name_are_made_by_their_commands(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for document in ("security", "machines", "tutorial"):
        text = (ROOT / f"docs/{document}.md").read_text()
        for words in commands(ROOT / f"docs/{document}.md"):
            if words[0] == "certs":
                assert CliRunner().invoke(app, words).exit_code == 0
        named = set(re.findall(r"\blab/[\w-]+\.(?:pem|key)\b", text))
        assert {"lab/me.pem", "lab/lab-ca.pem"} <= named
        assert named <= {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    for certificate in (tmp_path / "lab").glob("*.pem"):
        verify = ["openssl", "verify", "-x509_strict", "-CAfile", "lab/lab-ca.pem", str(certificate)]
        subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)
