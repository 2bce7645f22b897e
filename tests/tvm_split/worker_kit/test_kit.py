"""Kits: their content, and that one serves a stage where only a Python is installed."""

import json
import os
import platform
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tvm_split
from rpc_runtime.execution.cuda_runtime import CUDA_LIBRARY
from tests.helpers.empty_root import OUTSIDE, can_make_roots
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.models.small_onnx_model import INPUT_SHAPE, small_model
from tvm_split.errors import KitError
from tvm_split.worker_kit.distributions import IF_HERE, NEEDED, Platform
from tvm_split.worker_kit.kit import ALSO, TVM_CUDA_RUNTIME, WorkerKit, is_needed, write_kit
from tvm_split.worker_kit.start import problem_of

HERE = Platform(sys.version_info[:2], platform.machine())


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> WorkerKit:
    return write_kit(tmp_path_factory.mktemp("kits") / "kit", "cpu", HERE)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_kit_serves_a_stage_in_an_empty_root(kit: WorkerKit, tmp_path: Path) -> None:
    if not can_make_roots():
        pytest.skip("this process may not make namespaces")
    onnx.save(small_model(), tmp_path / "small.onnx")
    model = tvm_split.load_model(tmp_path / "small.onnx")
    tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(workers=1), stages=1)).save(
        tmp_path / "bundle"
    )
    batches = np.random.default_rng(0).standard_normal((5, *INPUT_SHAPE)).astype(np.float32)
    np.save(tmp_path / "inputs.npy", batches)
    (tmp_path / "root").mkdir()
    arguments = [tmp_path / "root", kit.path, tmp_path / "bundle", tmp_path / "inputs.npy"]
    command = [*OUTSIDE, sys.executable, "-m", "tests.helpers.kit_client", *map(str, arguments)]
    before = files_below(kit.path)
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    evaluator = ReferenceEvaluator(str(tmp_path / "small.onnx"))
    expected = [evaluator.run(None, {"image": batch})[0] for batch in batches]
    np.testing.assert_allclose(np.array(report["outputs"]), np.array(expected), rtol=1e-4, atol=1e-5)
    assert report["code"] == 0
    assert files_below(kit.path) == before
    assert not any(content for content in files_below(tmp_path / "root").values()), "the worker wrote into its root"


def test_a_kit_has_no_compiler_and_no_framework(kit: WorkerKit) -> None:
    names = [path.name for path in kit.path.rglob("*")]
    assert not [name for name in names if name.startswith("libtvm_compiler") or name == TVM_CUDA_RUNTIME]
    packages = {path.name for path in (kit.path / "packages").iterdir() if path.is_dir()}
    assert not packages & {"torch", "onnx", "onnxruntime", "scipy", "pydantic", "rich", "highspy"}
    assert not packages & {"tvm_split", "relay_passes", "schedules"}
    assert "rpc_runtime" in packages


def test_a_kit_has_all_that_its_packages_require() -> None:
    """Otherwise a kit would start here, where everything is installed, and not elsewhere."""
    packed = {canonicalize_name(name) for name in (*NEEDED, *IF_HERE, *ALSO)}
    for name in packed:
        required = {
            canonicalize_name(requirement.name)
            for requirement in map(Requirement, metadata.requires(name) or [])
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        }
        assert required <= packed, name


def test_a_tar_file_holds_the_same(kit: WorkerKit, tmp_path: Path) -> None:
    packed = write_kit(tmp_path / "kit.tar", "cpu", HERE)
    assert (packed.packed_bytes, kit.packed_bytes) == (packed.path.stat().st_size, None)
    assert kit.size_bytes == sum(map(len, files_below(kit.path).values()))
    assert packed.parts == kit.parts
    with tarfile.open(packed.path) as file:
        file.extractall(tmp_path, filter="data")
    assert files_below(tmp_path / "kit") == files_below(kit.path)


def test_a_kit_starts_with_the_python_that_it_was_packed_for(kit: WorkerKit) -> None:
    command = [sys.executable, str(kit.path), "--help"]
    assert "--listen" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_machine_of_another_kind_is_refused_with_what_to_do(kit: WorkerKit) -> None:
    described = json.loads((kit.path / "kit.json").read_text())
    python, machine = described["python"], platform.machine()
    assert problem_of(described, python, machine, "linux", "2.99") == ""
    assert problem_of(described, python, machine, "linux", "") == ""
    for *here, expected in (
        ("3.8", machine, "linux", "2.99", f"this kit is for Python {python}, and {sys.executable} is 3.8: start it"),
        (python, "riscv64", "linux", "2.99", "this machine is riscv64"),
        (python, machine, "darwin", "", "runs on Linux"),
        (python, machine, "linux", "2.4", "this system has 2.4"),
    ):
        assert expected in problem_of(described, *here)


@pytest.mark.parametrize("name", ["kit", "kit.tar", "nowhere/kit", "kit.zip", "kit.tar.zst"])
def test_what_cannot_be_written_is_refused_and_nothing_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit.tar").touch()
    with pytest.raises(KitError, match="kit"):
        write_kit(tmp_path / name, "cpu", HERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kit", "kit.tar"]


def test_a_package_that_pip_does_not_get_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(variable, value)
    other_platform = Platform((3, 12) if HERE.python != (3, 12) else (3, 13), HERE.architecture)
    with pytest.raises(KitError, match=r"pip does not get .*numpy.* for Python 3\.1"):
        write_kit(tmp_path / "kit", "cpu", other_platform)
    assert list(tmp_path.iterdir()) == []


def test_of_tvm_for_cuda_the_library_of_the_device_comes_too() -> None:
    assert is_needed("apache-tvm", f"tvm/lib/{TVM_CUDA_RUNTIME}", "cuda")
    assert not is_needed("apache-tvm", f"tvm/lib/{TVM_CUDA_RUNTIME}", "cpu")
    assert not is_needed("apache-tvm", "tvm/lib/libtvm_compiler.so", "cuda")
    assert f"lib{CUDA_LIBRARY}.so" == TVM_CUDA_RUNTIME
