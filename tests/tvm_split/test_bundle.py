"""Bundles of strangers: whatever a manifest says, it is a bundle or a `BundleError`, and touches nothing else."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    """A manifest with the digest that belongs to it, as whoever forges one would."""
    (folder / "manifest.json").write_text(content)
    (folder / "manifest.sha256").write_text(hashlib.sha256(content.encode()).hexdigest())


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each key it has."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


NONSENSE: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**64, 1e308, "", "x", "../x", "/tmp/x", "client", "float31", "float64", [], {}, [[]],
    [0], [-1], {"": None}, [2**62, 2**62], "\x00", "\ud800", "0" * 64,
]  # fmt: skip


def forged(manifest: dict[str, Any], seed: int) -> dict[str, Any]:
    """With one to three values replaced, taken away, renamed or doubled."""
    choose = random.Random(seed)
    result = copy.deepcopy(manifest)
    for _ in range(choose.randint(1, 3)):
        container, key = choose.choice(list(places(result)))
        action = choose.choice(["replace", "replace", "remove", "rename", "double"])
        if action == "replace":
            container[key] = copy.deepcopy(choose.choice(NONSENSE))
        elif action == "remove":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[str(choose.choice(NONSENSE))] = container.pop(key)
        elif action == "double" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
    return result


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 2**32))
def test_a_forged_manifest_is_refused_or_harmless(folder: Path, tmp_path: Path, seed: int) -> None:
    root = tmp_path / str(seed)
    shutil.copytree(folder, root / "bundle", dirs_exist_ok=True)
    write(root / "bundle", json.dumps(forged(json.loads((folder / "manifest.json").read_text()), seed)))
    try:
        bundle = tvm_split.Bundle.load(root / "bundle")
        bundle.save(root / "saved")
    except BundleError:
        pass
    assert {path.name for path in root.iterdir()} <= {"bundle", "saved"}
    shutil.rmtree(root)


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
