"""Bundles of strangers: what their manifests must not do. `tests/fuzz/test_files.py` tries more of it."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tvm_split
from tvm_split.errors import BundleError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    model = tvm_split.load_model(network, (torch.zeros(1, 4),))
    cluster = tvm_split.Cluster.in_process(machines=2, threads=1)
    planned = tvm_split.plan(model, cluster, split={"machine-a": ["0"], "machine-b": ["2"]})
    tvm_split.compile(model, planned, verify=False).save(folder)
    return folder


def write(folder: Path, content: str) -> None:
    """Write a manifest with its right digest, as a forger would."""
    (folder / "manifest.json").write_text(content)
    (folder / "manifest.sha256").write_text(hashlib.sha256(content.encode()).hexdigest())


@pytest.mark.parametrize("name", ["../escaped", "../../escaped", "{here}/escaped", "a/b", "..", "\x00", "\ud800"])
def test_names_stay_inside_of_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    bundle = tvm_split.Bundle.load(folder)
    named = replace(bundle, ir={name.format(here=tmp_path): "text", "annotated": "other"})
    named.save(tmp_path / "deep" / "saved")
    assert [path.name for path in tmp_path.rglob("*") if "escaped" in path.name and path.parent.name != "ir"] == []
    assert tvm_split.Bundle.load(tmp_path / "deep" / "saved").ir == named.ir


def test_a_manifest_does_not_read_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    (tmp_path / "secret").write_text("secret")
    manifest = json.loads((folder / "manifest.json").read_text())
    stage = manifest["program"]["stages"][0]
    stage["library"] = {"sha256": "../../secret", "size_bytes": 6}
    write(tmp_path / "bundle", json.dumps(manifest))
    with pytest.raises(BundleError, match="64 lowercase hexadecimal digits"):
        tvm_split.Bundle.load(tmp_path / "bundle")


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "[]", "null", "\x00"])
def test_what_is_no_manifest(folder: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    write(tmp_path / "bundle", content)
    with pytest.raises(BundleError):
        tvm_split.Bundle.load(tmp_path / "bundle")


def test_a_digest_that_is_no_text(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    (tmp_path / "bundle" / "manifest.sha256").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match=r"manifest\.json was changed"):
        tvm_split.Bundle.load(tmp_path / "bundle")


@pytest.mark.parametrize("victim", ["blobs/*", "ir/machine-a.py", "manifest.json"])
def test_a_changed_byte_is_told_with_its_file(folder: Path, tmp_path: Path, victim: str) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    path = next((tmp_path / "bundle").glob(victim))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=rf"{path.name} was changed: its SHA-256 is"):
        tvm_split.Bundle.load(tmp_path / "bundle")


def test_a_bundle_of_another_version(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    write(tmp_path / "bundle", json.dumps({**json.loads((folder / "manifest.json").read_text()), "version": 99}))
    with pytest.raises(BundleError, match=r"of version 99; this version of tvm-split reads .* of version \d"):
        tvm_split.Bundle.load(tmp_path / "bundle")


@pytest.mark.parametrize("place", ["ir", "ir/annotated.py", "blobs", "blobs/1", "manifest.json", "manifest.sha256"])
def test_links_lead_nowhere(folder: Path, tmp_path: Path, place: str) -> None:
    """Loading reads no file outside the bundle, and saving over such a bundle changes none."""
    linked, outside = tmp_path / "bundle", tmp_path / "outside"
    shutil.copytree(folder, linked)
    shutil.copytree(folder, outside)
    (outside / "ir" / "thesis.tex").touch()
    (outside / "blobs" / "1").touch()
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    if (linked / place).is_dir():
        shutil.rmtree(linked / place)
    (linked / place).unlink(missing_ok=True)
    (linked / place).symlink_to(outside / place)
    with pytest.raises(BundleError, match=f"{place} is a link"):
        tvm_split.Bundle.load(linked)
    renamed = replace(tvm_split.Bundle.load(folder), model="other")
    with pytest.raises(BundleError, match=f"{place} is a link"):
        renamed.save(linked)
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


def test_a_hard_link_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    outside = tmp_path / "outside"
    outside.hardlink_to(tmp_path / "bundle" / "manifest.json")
    before = outside.read_bytes()
    replace(tvm_split.Bundle.load(folder), model="other").save(tmp_path / "bundle")
    assert outside.read_bytes() == before
    assert tvm_split.Bundle.load(tmp_path / "bundle").model == "other"


@pytest.mark.parametrize("place", ["ir/annotated.py", "manifest.json", "manifest.sha256"])
def test_nobody_waits_for_a_pipe(folder: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(folder, tmp_path / "bundle")
    (tmp_path / "bundle" / place).unlink()
    os.mkfifo(tmp_path / "bundle" / place)
    with pytest.raises(BundleError, match=f"{place} is a pipe"):
        tvm_split.Bundle.load(tmp_path / "bundle")
