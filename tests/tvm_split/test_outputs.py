"""What a user names is written whole or not at all: on a full disk the message names it, and what was there stays."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tvm_split
from rpc_runtime.program.events import COMPUTE, TraceEvent
from rpc_runtime.program.runner import Outputs
from tests.helpers.full_disk import full_disk
from tests.models.small_onnx_model import small_model
from tvm_split.cli.inputs import save_outputs
from tvm_split.errors import OutputError
from tvm_split.frontends.onnx.annotations import save_model
from tvm_split.outputs import PREFIX, write_text
from tvm_split.pictures.plan_picture import draw_plan
from tvm_split.pictures.timeline import draw_picture
from tvm_split.worker_kit.distributions import Platform
from tvm_split.worker_kit.kit import write_kit


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    return tvm_split.load_model(small_model())


@pytest.fixture(scope="module")
def plan(model: tvm_split.Model) -> tvm_split.Plan:
    return tvm_split.plan(model, tvm_split.Cluster.in_process(1), split={"machine-a": list(model.layer_names)})


@pytest.fixture(scope="module")
def bundle(model: tvm_split.Model, plan: tvm_split.Plan) -> tvm_split.Bundle:
    return tvm_split.compile(model, plan, verify=False)


Write = Callable[[Path, tvm_split.Model, tvm_split.Plan], object]
EVENTS = [TraceEvent("machine-a", "s", 0, COMPUTE, 0, 1)]
FILES: dict[str, Write] = {
    "plan.json": lambda path, model, plan: plan.save(path),
    "plan.svg": lambda path, model, plan: draw_plan(model, plan, path),
    "timeline.svg": lambda path, *_: draw_picture(EVENTS, ["machine-a"], "title", path),
    "outputs.npz": lambda path, *_: save_outputs(path, [Outputs((np.zeros(1000),), ("y",))]),
    "annotated.onnx": lambda path, *_: save_model(small_model(), path, path),
    "ir.py": lambda path, *_: write_text(path, "x" * 1000),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_whole_or_what_it_was(tmp_path: Path, model, plan, name: str) -> None:
    path, write = tmp_path / name, FILES[name]
    for before in ({}, {name: b"old"}):
        for existing, content in before.items():
            (tmp_path / existing).write_bytes(content)
        with full_disk(), pytest.raises(OutputError, match=f"^{path} cannot be written: File too large; make room"):
            write(path, model, plan)
        assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before
    path.chmod(0o640)
    write(path, model, plan)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert path.stat().st_size > 64


@pytest.mark.parametrize("name", ["kit", "kit.tar"])
def test_a_kit_is_whole_or_not_there(tmp_path: Path, name: str) -> None:
    here = Platform(sys.version_info[:2], os.uname().machine)
    with full_disk(), pytest.raises(OutputError, match=f"{tmp_path / name} cannot be written"):
        write_kit(tmp_path / name, "cpu", here)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_whole_or_what_it_was(tmp_path: Path, bundle: tvm_split.Bundle) -> None:
    folder = tmp_path / "deep" / "bundle"
    for _ in range(2):  # the first try must not be in the way of the second
        with full_disk(1000), pytest.raises(OutputError, match=f"^{folder} cannot be written: File too large"):
            bundle.save(folder)
        assert not folder.exists()
    bundle.save(folder)
    with full_disk(1000), pytest.raises(OutputError, match=f"^{folder} cannot be written: File too large"):
        replace(bundle, ir={"annotated": "other"}).save(folder)
    assert tvm_split.Bundle.load(folder) == bundle
    assert len(list(folder.iterdir())) == 4


def test_a_folder_stays_the_one_that_was_mounted_there(tmp_path: Path, bundle: tvm_split.Bundle) -> None:
    tmp_path.chmod(0o711)
    before = tmp_path.stat()
    (tmp_path / f"{PREFIX}0123").mkdir()  # of a process that was killed
    bundle.save(tmp_path)
    other = replace(tvm_split.Bundle.load(tmp_path), model="other")
    other.save(tmp_path)  # its blobs are those that are replaced
    assert tvm_split.Bundle.load(tmp_path) == other
    assert (tmp_path.stat().st_ino, tmp_path.stat().st_mode) == (before.st_ino, before.st_mode)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("place", [0, 3, 4, 7])
def test_ctrl_c_between_two_renamings_changes_nothing(
    tmp_path: Path, bundle: tvm_split.Bundle, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    bundle.save(tmp_path)
    rename, calls = Path.rename, iter(range(100))

    def interrupted(path: Path, target: Path) -> Path:
        if next(calls) == place:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(bundle, model="other").save(tmp_path)
    assert tvm_split.Bundle.load(tmp_path) == bundle
    assert len(list(tmp_path.iterdir())) == 4


def test_links_and_devices_stay(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, null = tmp_path / "link", tmp_path / "null"
    link.symlink_to("far/file")
    null.symlink_to("/dev/null")
    for path in (link, null):
        write_text(path, "text")
    assert (tmp_path / "far/file").read_text() == "text"
    assert null.is_char_device()
    with pytest.raises(OutputError, match=r"^/dev/full cannot be written: No space left on device; make room"):
        write_text("/dev/full", "text")


def test_a_folder_that_is_not_there_or_closed(tmp_path: Path) -> None:
    for place, reason in (("nowhere/file", "No such file or directory"), ("file/file", "Not a directory")):
        (tmp_path / "file").touch()
        with pytest.raises(OutputError, match=f"^{tmp_path / place} cannot be written: {reason}$"):
            write_text(tmp_path / place, "text")
