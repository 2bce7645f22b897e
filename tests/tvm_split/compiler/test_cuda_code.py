"""CUDA stages, compiled without a GPU: machine code that a worker loads, and workers that cannot run it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import given, strategies

import tvm_split
from rpc_runtime.client.worker_client import CudaDescription, CudaDeviceDescription, WorkerDescription, describe
from rpc_runtime.execution.cuda_code import PACKED, SOURCE, toolkit_version
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.answer import answer
from tests.helpers.gpu_driver import driver_for, require_toolkit
from tests.helpers.rpc_runtime.worker_process import ready, start_worker
from tests.helpers.schedules.gpu_kernels import plan_for_a_gpu
from tests.helpers.waiting import PATIENCE_SECONDS
from tests.models.small_onnx_model import small_model
from tvm_split.compiler import cuda_code
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.errors import CompileError

LOAD = """
import json, sys, tempfile
from pathlib import Path
from rpc_runtime.worker.runtime_alone import load_runtime
load_runtime()
from rpc_runtime.execution import cuda_code
unpacked = []
def watched(code):
    unpacked.append(cuda_code.binary_of(code))
    return unpacked[-1]
import tvm_ffi
tvm_ffi.register_global_func(cuda_code.CALLBACK, watched, override=True)
def kinds(module):
    return [module.kind, *(kind for each in module.imports for kind in kinds(each))]
module = tvm_ffi.load_module(sys.argv[1])
print(json.dumps([kinds(module), [code[:4].hex() for code in unpacked]]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tvm_split.Model:
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(small_model(), path)
    return tvm_split.load_model(path)


def compiled(model: tvm_split.Model, arch: str, folder: Path) -> tuple[tvm_split.Bundle, Path]:
    bundle = tvm_split.compile(model, plan_for_a_gpu(model, arch, folder), verify=False)
    (stage,) = bundle.program.stages
    return bundle, bundle.blob_path(stage.library.sha256)


def test_a_worker_loads_machine_code_without_a_compiler(model: tvm_split.Model, tmp_path: Path) -> None:
    require_toolkit()
    bundle, library = compiled(model, "sm_80", tmp_path)
    assert bundle.cuda == {"stage_0": CudaNeeds("sm_80", toolkit_version())}
    content = library.read_bytes()
    assert content.count(PACKED.encode() + b"sm_80") == 1
    assert b"__global__" not in content
    # On a machine with the driver alone; what is on the PATH is no compiler.
    environment = {**driver_for(13000, tmp_path), "PATH": "/nowhere"}
    copied = shutil.copy(library, tmp_path / "stage.so")
    kinds, unpacked = answer("-c", LOAD, str(copied), environment=environment)
    assert "cuda" in kinds
    assert unpacked == ["50ed55ba"]


def test_without_a_compiler_the_source_stays_and_is_told(
    model: tvm_split.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_code, "find_nvcc", lambda: None)
    bundle, library = compiled(model, "sm_90", tmp_path)
    assert bundle.cuda == {"stage_0": CudaNeeds("sm_90", None)}
    assert SOURCE.encode() + b"sm_90\n" in library.read_bytes()
    bundle.save(tmp_path / "bundle")
    assert tvm_split.Bundle.load(tmp_path / "bundle").cuda == bundle.cuda


def test_a_gpu_without_an_architecture_is_refused_before_compiling(model: tvm_split.Model, tmp_path: Path) -> None:
    plan = plan_for_a_gpu(model, "sm_90", tmp_path)
    nameless = replace(plan, machines=tuple(replace(machine, target={"kind": "cuda"}) for machine in plan.machines))
    with pytest.raises(tvm_split.PlanError, match="names no architecture"):
        tvm_split.compile(model, nameless)


def test_an_architecture_that_nvcc_does_not_know(model: tvm_split.Model, tmp_path: Path) -> None:
    require_toolkit()
    with pytest.raises(CompileError, match=r"stage_0 cannot be compiled.*sm_30"):
        compiled(model, "sm_30", tmp_path)


def worker_with(arch: str | None, driver: int, compiler: str = "", problem: str = "") -> WorkerDescription:
    fields = dict.fromkeys(WorkerDescription.__dataclass_fields__)
    devices = () if arch is None else (CudaDeviceDescription(0, arch, 1 << 34),)
    described: dict[str, object] = {
        **fields,
        "cuda_devices": devices,
        "cuda": CudaDescription(driver, problem, compiler),
    }
    return WorkerDescription(**described)  # type: ignore[arg-type]


MISFITS = [
    (CudaNeeds("sm_90", (13, 0)), worker_with("sm_90", 13000), ""),
    (CudaNeeds("sm_80", (13, 0)), worker_with("sm_86", 13000), ""),
    (CudaNeeds("sm_90", None), worker_with("sm_90", 13000, compiler="13.0"), ""),
    (CudaNeeds("sm_90a", (13, 0)), worker_with("sm_90", 13000), ""),
    (CudaNeeds("sm_90", (13, 0)), worker_with(None, 0, problem="there is no NVIDIA driver"), "no NVIDIA driver"),
    (CudaNeeds("sm_90", (13, 0)), worker_with("sm_80", 13000), "does not run code for sm_90: give .* sm_80"),
    (CudaNeeds("sm_90", (13, 0)), worker_with("sm_90", 12080), "driver for CUDA 12.8, and TVM's library"),
    (CudaNeeds("sm_90", (14, 0)), worker_with("sm_90", 13020), "machine code of CUDA 14.0 needs one for 14.0"),
    (CudaNeeds("sm_80", (13, 1)), worker_with("sm_90", 13000), "PTX for sm_80, .* of CUDA 13.1 needs one for 13.1"),
    (CudaNeeds("sm_90", None), worker_with("sm_90", 13000), "has no nvcc"),
]


@pytest.mark.parametrize(("needs", "worker", "expected"), MISFITS)
def test_who_can_run_what(needs: CudaNeeds, worker: WorkerDescription, expected: str) -> None:
    problem = cuda_misfit(needs, worker)
    assert bool(problem) == bool(expected)
    assert re.search(expected, problem)


@given(driver=strategies.integers(13000, 13090), toolkit=strategies.integers(0, 9), kinds=strategies.booleans())
def test_a_newer_driver_never_misfits_where_an_older_one_does_not(driver: int, toolkit: int, kinds: bool) -> None:
    needs = CudaNeeds("sm_80", (13, toolkit))
    worker = worker_with("sm_90" if kinds else "sm_80", driver)
    newer = replace(worker, cuda=CudaDescription(driver + 10, "", ""))
    assert cuda_misfit(needs, worker) or not cuda_misfit(needs, newer)


def test_a_driver_that_is_too_old_is_told_before_anything_is_sent(model: tvm_split.Model, tmp_path: Path) -> None:
    require_toolkit()
    bundle, _ = compiled(model, "sm_90", tmp_path)
    worker = start_worker(
        tmp_path / "cache", "--listen", "127.0.0.1:0", "--name", "gpu", "--json", **driver_for(12080, tmp_path)
    )
    try:
        address = ready(worker)
        description = describe(WorkerEndpoint("gpu", address), timeout_seconds=20)
        assert description.cuda.driver == 12080
        assert "needs one for 13.0" in description.cuda.problem
        (tmp_path / "there.json").write_text(json.dumps({"machines": [{"name": "gpu", "address": address}]}))
        cluster = tvm_split.Cluster.from_yaml(tmp_path / "there.json")
        with pytest.raises(tvm_split.ClusterError, match=r"stage_0 on 'gpu' is compiled for CUDA.*12\.8.*13\.0"):
            tvm_split.deploy(bundle, cluster)
        cuda = [{"name": "gpu", "address": address, "target": {"kind": "cuda", "arch": "sm_90"}}]
        (tmp_path / "said.json").write_text(json.dumps({"machines": cuda}))
        with pytest.raises(tvm_split.ClusterError, match=r"described with the target.*12\.8.*13\.0 or newer"):
            tvm_split.plan(model, tvm_split.Cluster.from_yaml(tmp_path / "said.json"), stages=1)
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        worker.terminate()
        worker.communicate(timeout=PATIENCE_SECONDS)
