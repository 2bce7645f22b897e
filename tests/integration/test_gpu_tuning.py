"""Tuning for CUDA on machines without a GPU: requests rejected before measuring, and what is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tvm_split
from rpc_runtime.execution.cuda_code import PACKED
from schedules import machine_of
from schedules.tuning import Measurer
from schedules.tuning.database import RECORDS
from tests.helpers.gpu_driver import driver_for, require_toolkit
from tests.helpers.rpc_lab import KEY, RpcLab
from tests.helpers.schedules.gpu_kernels import nvcc, plan_for_a_gpu
from tvm_split.compiler.cuda_code import tuning_needs
from tvm_split.compiler.targets import tvm_target
from tvm_split.tuning import kernels_to_tune

TARGET = {"kind": "cuda", "arch": "sm_90"}
BUILT_FOR = tvm_target(TARGET)
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
pytestmark = pytest.mark.usefixtures("no_process_stays")


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, padding=1)
        ).eval()
    return tvm_split.load_model(network, (torch.randn(1, 3, 12, 12),))


@pytest.fixture(scope="module")
def plan(model: tvm_split.Model, tmp_path_factory: pytest.TempPathFactory) -> tvm_split.Plan:
    return plan_for_a_gpu(model, "sm_90", tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def kernel(model, plan):
    return kernels_to_tune(model, plan, ["gpu"], TARGET)[0][-1]


def refused(model, plan, lab, folder, monkeypatch):
    monkeypatch.setattr("tvm_split.tuning.kernels_to_tune", no_preparing)
    with pytest.raises(tvm_split.TuningError) as caught:
        tvm_split.tune(model, plan, database=folder / "tuned", trials=3, tracker=lab.address, key=KEY)
    assert not (folder / "tuned" / RECORDS).exists()
    return str(caught.value)


def no_preparing(*_):
    raise AssertionError("it was prepared before it was refused")


@pytest.mark.slow
def test_a_server_of_tvm_is_refused(model, plan, tmp_path, monkeypatch):
    with RpcLab(tmp_path, servers=1) as lab:
        error = refused(model, plan, lab, tmp_path, monkeypatch)
    assert f"a device of key {KEY!r} at the tracker {lab.address} is a server of TVM's own" in error
    assert "tvm-split worker" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "reason"),
    [(None, "driver"), (12080, "for CUDA 12.8, and TVM's library for GPUs needs one for 13.0"), (13000, "no GPU")],
)
def test_a_worker_without_a_gpu_is_refused(model, plan, tmp_path, monkeypatch, driver, reason):
    if driver is not None:
        require_toolkit()
        (tmp_path / "driver").mkdir()
        for name, value in driver_for(driver, tmp_path / "driver").items():
            monkeypatch.setenv(name, value)
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker("gpu", "--insecure")
        lab.wait_listed(lambda workers: "gpu" in workers and workers["gpu"].registration.tunes)
        error = refused(model, plan, lab, tmp_path, monkeypatch)
    assert "has no GPU to measure on, and the target says sm_90" in error
    assert reason in error


@needs_nvcc
@pytest.mark.slow
def test_candidates_are_built_to_machine_code_and_spills_are_kept_as_reasons(kernel, tmp_path):
    space = kernel.template.space(kernel.function, machine_of(BUILT_FOR))
    default = kernel.template.kernel(kernel.function, machine_of(BUILT_FOR), space.default)
    # More results per thread than registers: the search space has no such candidates.
    too_many = {**space.default, "tile": "128x128", "registers": "16x16", "depth": 8, "slices": 1}
    assert not space.contains(too_many)
    with BUILT_FOR:
        large = kernel.template.kernel(kernel.function, machine_of(BUILT_FOR), too_many)
    with Measurer(BUILT_FOR, tmp_path, gpu=tuning_needs(TARGET)) as measurer:
        good, bad = measurer.build([{"main": default}, {"main": large}])
        assert good.error is None
        assert f"{PACKED}sm_90".encode() in Path(good.path).read_bytes()
        assert bad.path is None
        assert "spills" in bad.error


@pytest.mark.slow
def test_what_evicts_a_gpus_cache_is_called_before_each_run_of_a_worker(tmp_path):
    """Runs on the worker's CPU: the functions and their calls are the same, only the device differs."""
    import tvm
    from tvm import te

    from schedules.tuning.devices import GPU_EVICTION, session_at, timed_in_turn

    x = te.placeholder((64,), name="x")
    function = te.create_prim_func([x, te.compute((64,), lambda i: x[i] + 1, name="y")])
    library = tmp_path / "kernel.so"
    tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm").export_library(library)
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker("cpu", "--insecure")
        lab.wait_listed(lambda workers: "cpu" in workers and workers["cpu"].registration.tunes)
        connect = session_at(lab.tracker(), lambda session: "")
        times = timed_in_turn(connect, [((64,), "float32")] * 2, ("main",), 2, 3, "cpu", GPU_EVICTION)(str(library))
    assert len(times) == 2
    assert all(seconds > 0 for seconds in times)
