"""Tuning through a tracker with servers, one of them killed; and for GPUs on machines without one: what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from tvm import te

import tvm_split
from rpc_runtime.execution.cuda_code import PACKED
from schedules import machine_of
from schedules.template import text_of
from schedules.traits import traits_of
from schedules.tuning.database import RECORDS, DatabaseWriter
from schedules.tuning.devices import GPU_EVICTION, session_at, timed_in_turn
from schedules.tuning.measuring import Effort, Measurer
from tests.helpers.gpu_driver import driver_for, require_toolkit
from tests.helpers.rpc_lab import KEY, RpcLab
from tests.helpers.schedules.gpu_kernels import nvcc, plan_for_a_gpu
from tests.helpers.schedules.schedule_harness import normal
from tvm_split.compiler.cuda_code import tuning_needs
from tvm_split.compiler.targets import tvm_target
from tvm_split.tuning import kernels_to_tune

QUICK = Effort(rounds=1, runs=3, build_timeout_seconds=60.0)
GPU = {"kind": "cuda", "arch": "sm_90"}
pytestmark = pytest.mark.usefixtures("no_process_stays")


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1),
            torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10),
        ).eval()  # fmt: skip
    return tvm_split.load_model(network, (torch.randn(1, 3, 6, 6),))


@pytest.fixture(scope="module")
def plan(model: tvm_split.Model) -> tvm_split.Plan:
    return tvm_split.plan(model, tvm_split.Cluster.in_process(machines=2, threads=1))


def tried(folder: Path) -> list[str]:
    """Return a text (kernel and choices) per measured candidate, without duels, which measure candidates again."""
    records = map(json.loads, (folder / RECORDS).read_text().splitlines())
    return [
        f"{record['kernel']} {record['choices']}"
        for record in records
        if not record["is_decision"] and len(record["rounds"]) <= 1
    ]


@pytest.mark.slow
def test_tracker_with_two_servers_one_of_which_is_killed(model, plan, tmp_path):
    with RpcLab(tmp_path, servers=2) as lab:
        devices = []

        def kill_in_the_middle(progress):
            devices.append(progress.devices)
            if progress.doing == "searching" and lab.servers[1].poll() is None:
                lab.kill_server(1)

        report = tvm_split.tune(
            model, plan, database=tmp_path / "tuned", trials=18, tracker=lab.address, key=KEY, effort=QUICK,
            on_progress=kill_in_the_middle,
        )  # fmt: skip
    assert devices[0] == 2
    assert report.trials == 18
    assert all(kernel.default_seconds is not None for kernel in report.kernels)
    assert sum(kernel.failures for kernel in report.kernels) <= 1
    shares = sum(kernel.share for kernel in report.kernels)
    assert shares + report.fixed_seconds / report.default_seconds == pytest.approx(1.0)
    assert len(set(tried(tmp_path / "tuned"))) == 18


@pytest.mark.slow
def test_the_database_changes_what_is_compiled(model, plan, tmp_path, monkeypatch):
    """The default folder's decisions are used without a request, and the results stay those of the source."""
    folder = tmp_path / "tuned"
    report = tvm_split.tune(model, plan, database=folder, trials=0, effort=QUICK)
    assert len(report.kernels) == 3
    assert not any(kernel.kept for kernel in report.kernels)
    target = tvm_target(plan.machines[0].target)
    kernels = kernels_to_tune(model, plan, [machine.name for machine in plan.machines], plan.machines[0].target)[0]
    decided = {}
    with DatabaseWriter(folder) as writer:
        for kernel in kernels:
            decided[kernel.name] = other_choices(kernel, target)
            writer.add_decision(kernel.function, target, decided[kernel.name], 1e-9)
    monkeypatch.setenv("TVM_SPLIT_DATABASE", str(folder))
    bundle = tvm_split.compile(model, plan, dump_folder=tmp_path / "dump")
    assert bundle.verified == "yes"
    scheduled = "\n".join(path.read_text() for path in (tmp_path / "dump").glob("*/*schedule.py"))
    assert scheduled.count("(tuned)") == 3
    assert all(choices in scheduled for choices in decided.values())
    monkeypatch.setenv("TVM_SPLIT_DATABASE", str(tmp_path / "none"))
    tvm_split.compile(model, plan, dump_folder=tmp_path / "other", verify=False)
    assert not any("(tuned)" in path.read_text() for path in (tmp_path / "other").glob("*/*schedule.py"))
    assert tvm_split.tune(model, plan, database=folder, trials=0, effort=QUICK).kernels[0].kept
    x = normal(5, 1, 3, 6, 6)
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(machines=2, threads=1)) as deployment:
        (output,) = deployment.run(x)
    assert np.abs(output - model.reference.outputs((x,))[0]).max() < 1e-4


def other_choices(kernel, target):
    space = kernel.template.space(kernel.function, traits_of(target))
    return text_of(next(candidate for candidate in space.all_choices() if candidate != space.default))


@pytest.mark.slow
def test_a_device_with_another_number_of_threads_is_refused(model, plan, tmp_path):
    with (
        RpcLab(tmp_path, servers=1, threads=2) as lab,
        pytest.raises(tvm_split.TuningError, match=r"with 2 threads, and the target says 1.*TVM_NUM_THREADS=1"),
    ):
        tvm_split.tune(model, plan, database=tmp_path / "tuned", trials=3, tracker=lab.address, key=KEY, effort=QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tracker": "127.0.0.1:1", "key": "x", "device_timeout_seconds": 0.1}, "no tracker can be reached"),
        ({"tracker": "127.0.0.1:1"}, "without a key"),
        ({"key": "x"}, "without a tracker"),
        ({"tracker": "here", "key": "x"}, "an address is HOST:PORT"),
        ({"tracker": "127.0.0.1:70000", "key": "x"}, "'127.0.0.1:70000': .* a port from 0 to 65535"),
        ({"tracker": "[::1]:1", "key": "x", "device_timeout_seconds": 0.1}, r"no tracker can be reached at \[::1\]:1 "),
    ],
)
def test_wrong_use(model, plan, tmp_path, options, message):
    with pytest.raises(tvm_split.TuningError, match=message):
        tvm_split.tune(model, plan, database=tmp_path, **options)


def test_no_server_of_the_key(model, plan, tmp_path):
    with RpcLab(tmp_path, servers=0) as lab, pytest.raises(tvm_split.TuningError, match="keys there: none"):
        tvm_split.tune(
            model, plan, database=tmp_path, tracker=lab.address, key=KEY, device_timeout_seconds=0.1, effort=QUICK
        )


@pytest.fixture(scope="module")
def gpu_plan(model: tvm_split.Model, tmp_path_factory: pytest.TempPathFactory) -> tvm_split.Plan:
    return plan_for_a_gpu(model, "sm_90", tmp_path_factory.mktemp("plan"))


def refused(model, gpu_plan, lab, folder, monkeypatch):
    monkeypatch.setattr("tvm_split.tuning.kernels_to_tune", no_preparing)
    with pytest.raises(tvm_split.TuningError) as caught:
        tvm_split.tune(model, gpu_plan, database=folder / "tuned", trials=3, tracker=lab.address, key=KEY)
    assert not (folder / "tuned" / RECORDS).exists()
    return str(caught.value)


def no_preparing(*_):
    raise AssertionError("it was prepared before it was refused")


@pytest.mark.slow
def test_a_server_of_tvm_is_refused(model, gpu_plan, tmp_path, monkeypatch):
    with RpcLab(tmp_path, servers=1) as lab:
        error = refused(model, gpu_plan, lab, tmp_path, monkeypatch)
    assert f"a device of key {KEY!r} at the tracker {lab.address} is a server of TVM's own" in error
    assert "tvm-split worker" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "reason"),
    [(None, "driver"), (12080, "for CUDA 12.8, and TVM's library for GPUs needs one for 13.0"), (13000, "no GPU")],
)
def test_a_worker_without_a_gpu_is_refused(model, gpu_plan, tmp_path, monkeypatch, driver, reason):
    if driver is not None:
        require_toolkit()
        (tmp_path / "driver").mkdir()
        for name, value in driver_for(driver, tmp_path / "driver").items():
            monkeypatch.setenv(name, value)
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker("gpu", "--insecure")
        lab.wait_listed(lambda workers: "gpu" in workers and workers["gpu"].registration.tunes)
        error = refused(model, gpu_plan, lab, tmp_path, monkeypatch)
    assert "has no GPU to measure on, and the target says sm_90" in error
    assert reason in error


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
@pytest.mark.slow
def test_candidates_are_built_to_machine_code_and_spills_are_kept_as_reasons(tmp_path):
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 32, 3, padding=1)).eval()
    model, built_for = tvm_split.load_model(convolutions, (torch.zeros(1, 3, 14, 14),)), tvm_target(GPU)
    kernel = kernels_to_tune(model, plan_for_a_gpu(model, "sm_90", tmp_path), ["gpu"], GPU)[0][-1]
    space = kernel.template.space(kernel.function, machine_of(built_for))
    default = kernel.template.kernel(kernel.function, machine_of(built_for), space.default)
    # More results per thread than registers: the search space has no such candidates.
    too_many = {**space.default, "tile": "128x128", "registers": "16x16", "depth": 8, "slices": 1}
    assert not space.contains(too_many)
    with built_for:
        large = kernel.template.kernel(kernel.function, machine_of(built_for), too_many)
    with Measurer(built_for, tmp_path, gpu=tuning_needs(GPU)) as measurer:
        good, bad = measurer.build([{"main": default}, {"main": large}])
        assert good.error is None
        assert f"{PACKED}sm_90".encode() in Path(good.path).read_bytes()
        assert bad.path is None
        assert "spills" in bad.error


@pytest.mark.slow
def test_what_evicts_a_gpus_cache_is_called_before_each_run_of_a_worker(tmp_path):
    """Runs on the worker's CPU: the functions and their calls are the same, only the device differs."""
    x = te.placeholder((64,), name="x")
    function = te.create_prim_func([x, te.compute((64,), lambda i: x[i] + 1, name="y")])
    library = tmp_path / "kernel.so"
    tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm").export_library(library)
    with RpcLab(tmp_path, servers=0) as lab:
        lab.start_worker("cpu", "--insecure")
        lab.wait_listed(lambda workers: "cpu" in workers and workers["cpu"].registration.tunes)
        connect = session_at(lab.tracker(), lambda session: "")
        arguments = [((64,), "float32")] * 2
        times = timed_in_turn(connect, arguments, ("main",), 2, 3, "cpu", GPU_EVICTION, 10.0)(str(library))
    assert len(times) == 2
    assert all(seconds > 0 for seconds in times)
