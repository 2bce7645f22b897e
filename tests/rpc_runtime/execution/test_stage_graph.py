"""Stages as CUDA graphs: TVM's machine and its library for GPUs, on a machine whose GPU is a stand-in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import relax

import tvm_split
from tests.helpers.answer import answer
from tests.helpers.gpu_driver import require_toolkit
from tests.helpers.rpc_runtime.emulated_machine import ARCH, emulated_machine
from tests.helpers.rpc_runtime.graph_scenarios import HOSTS_FUNCTION, SCENARIOS
from tests.helpers.schedules.gpu_kernels import plan_for_a_gpu
from tvm_split.compiler import cuda_code
from tvm_split.deployment.deployment import Deployment
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.execution.switches import CUDA_GRAPHS, OVERLAP

GPU = "gpu"


def network() -> nn.Module:
    """Whose first and last products are cut into slices: two kernels in one function, with memory between them."""
    torch.manual_seed(0)
    layers = (nn.Linear(256, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 256), nn.Softmax(-1), nn.Linear(256, 8))
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    require_toolkit()
    folder = tmp_path_factory.mktemp("machine")
    return folder, emulated_machine(folder)


@pytest.fixture(scope="module")
def bundle(machine: tuple[Path, dict[str, str]]) -> tvm_split.Bundle:
    """Two stages on one machine, with the source of their kernels."""
    folder, _ = machine
    model = tvm_split.load_model(network(), (torch.zeros(8, 256),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_code, "find_nvcc", lambda: None)
        plan = plan_for_a_gpu(model, ARCH, folder, stages=2)
        made = tvm_split.compile(model, plan, verify=False)
    assert [stage.machine for stage in made.program.stages] == [GPU, GPU]
    libraries = [made.blob_path(stage.library.sha256).read_bytes() for stage in made.program.stages]
    assert all(b"BackendAllocWorkspace" in library for library in libraries)
    made.save(folder / "bundle")
    return made


@pytest.fixture(scope="module")
def found(machine: tuple[Path, dict[str, str]], bundle: tvm_split.Bundle) -> dict[str, str]:
    folder, environment = machine
    calling_the_host(folder / "host.so")
    module = "tests.helpers.rpc_runtime.graph_scenarios"
    return dict(answer("-m", module, str(folder), environment=environment, seconds=500))


def calling_the_host(path: Path) -> None:
    """The library of a stage that calls a function of the process, and no kernel."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    with builder.function("main", [x]):
        value = builder.emit(relax.call_pure_packed(HOSTS_FUNCTION, x, ty_args=[relax.TensorType((2, 8), "float32")]))
        builder.emit_func_output(relax.Tuple([value]))
    relax.build(builder.get(), tvm.target.Target({"kind": "llvm"})).export_library(str(path))


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
def test_stages_as_graphs(found: dict[str, str], scenario: str) -> None:
    assert not found[scenario], found[scenario]


@pytest.fixture
def worker(machine: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machine[1].items():
        monkeypatch.setenv(name, value)


def stream(deployment: Deployment, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    batches = [(torch.randn(8, 256, generator=generator).numpy(),) for _ in range(count)]
    with torch.inference_mode():
        expected = [network()(torch.from_numpy(batch)).numpy() for (batch,) in batches]
    for (output,), wanted in zip(deployment.stream(batches), expected, strict=True):
        assert np.abs(output - wanted).max() < 1e-5 * np.ptp(wanted)


@pytest.mark.usefixtures("worker")
def test_a_worker_launches_its_stages_as_graphs_where_it_is_asked_to(
    bundle: tvm_split.Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two deployments of one worker at a time; and without being asked, or without overlap, kernel by kernel."""
    states = {}
    for graphs, overlap in (("1", "1"), ("0", "1"), ("1", "0")):
        monkeypatch.setenv(CUDA_GRAPHS.variable, graphs)
        monkeypatch.setenv(OVERLAP.variable, overlap)
        with LocalWorkers((GPU,), start_timeout_seconds=100) as workers:
            target = {"kind": "cuda", "arch": ARCH}
            described = tvm_split.Machine(GPU, 1, target, endpoint=workers.endpoints[GPU])
            cluster = tvm_split.Cluster("remote", (described,), ())
            with (
                tvm_split.deploy(bundle, cluster, timeout_seconds=100) as first,
                tvm_split.deploy(bundle, cluster, timeout_seconds=100) as second,
            ):
                stream(first, 6)
                stream(second, 3)
                stream(first, 3)
                states[graphs, overlap] = {each.cuda_graph for one in (first, second) for each in one.stats().stages}
    assert states[("1", "1")] == {"recorded"}
    assert states[("0", "1")] == {""}
    assert states[("1", "0")] == {"TVM_SPLIT_OVERLAP is 0"}
