"""Compiling: readable and reproducible, also for other machines."""

import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tvm_split
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.bundle import Verified
from tvm_split.errors import CompileWarning
from tvm_split.launchers.local import Local
from tvm_split.placement.corrections import Measured
from tvm_split.planning.replan import replan


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv1(x)))
        return self.fc(torch.relu(self.conv2(x) + x).flatten(1))


SPLIT = {"machine-a": ["conv1"], "machine-b": ["conv2"]}


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    torch.manual_seed(0)
    return tvm_split.load_model(Network().eval(), (torch.randn(1, 3, 8, 8),))


@pytest.fixture(scope="module")
def bundle(model: tvm_split.Model) -> tvm_split.Bundle:
    return tvm_split.compile(model, tvm_split.plan(model, Cluster.local(2), split=SPLIT))


def test_every_machine_can_be_read(bundle: tvm_split.Bundle) -> None:
    assert set(bundle.ir) == {"annotated", "machine-a", "machine-b"}
    assert 'R.call_packed("tvm_split.send", relu_sent, R.str("relu"), R.str("machine-b")' in bundle.ir["machine-a"]
    assert 'R.call_packed("tvm_split.receive", R.str("relu"), R.str("machine-a")' in bundle.ir["machine-b"]
    assert "R.to_vdevice(relu_sent" in bundle.ir["annotated"]
    # The printed program is the compiled one: transferred tensors have the shapes that the bundle states.
    (crossing,) = bundle.program.stages[0].outputs
    assert f"relu: R.Tensor(({', '.join(map(str, crossing.shape))})" in bundle.ir["machine-b"]


def test_a_prediction_is_for_one_graph_and_any_weights() -> None:
    class Scaled(nn.Module):
        def __init__(self, width: int, scale: float) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)
            self.scale = nn.Parameter(torch.tensor(scale))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)) * self.scale)

    def loaded(width: int, scale: float, batch: int) -> tvm_split.Model:
        return tvm_split.load_model(Scaled(width, scale).eval(), (torch.randn(batch, 4),))

    cluster = Cluster.local(2)
    split = {"machine-a": ["first"], "machine-b": ["last"]}
    made_for = loaded(8, 0.5, 1)
    planned = tvm_split.plan(made_for, cluster, split=split, predict=True, estimate=True)
    assert planned.prediction is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tvm_split.compile(loaded(8, 0.7, 1), planned).plan == planned
    for other in (loaded(8, 0.5, 3), loaded(16, 0.5, 1)):
        with pytest.warns(CompileWarning, match="prediction"):
            bundle = tvm_split.compile(other, planned)
        assert bundle.plan == replace(planned, prediction=None, inputs=other.inputs, graph_digest=other.graph_digest)
        with pytest.raises(tvm_split.PlanError, match="another model"):
            replan(other, cluster, planned, Measured({"machine-a": 2.0}), estimate=True)


def test_every_phase_can_be_dumped(model: tvm_split.Model, tmp_path: Path) -> None:
    planned = tvm_split.plan(model, Cluster.local(2), split=SPLIT)
    tvm_split.compile(model, planned, verify=False, dump_folder=tmp_path)
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["1-annotated.py"]
    names = [path.name for path in sorted((tmp_path / "stage_1").iterdir())]
    assert names == [
        "1-simplify.py",
        "2-layout.py",
        "3-lower.py",
        "4-group.py",
        "5-fuse.py",
        "6-schedule.py",
        "7-name.py",
    ]


def test_a_folder_to_dump_into_that_cannot_be_made(model: tvm_split.Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    planned = tvm_split.plan(model, Cluster.local(2), split=SPLIT)
    with pytest.raises(tvm_split.TvmSplitError, match=r"file/dump.* cannot be written"):
        tvm_split.compile(model, planned, verify=False, dump_folder=tmp_path / "file" / "dump")


def machine_of(library: Path) -> str:
    header = subprocess.run(["readelf", "-h", library], capture_output=True, text=True, check=True).stdout
    return next(line.partition(":")[2].strip() for line in header.splitlines() if "Machine:" in line)


@pytest.mark.parametrize(
    ("target", "expected", "verified"),
    [
        ({"kind": "llvm", "mcpu": "x86-64-v2"}, "Advanced Micro Devices X86-64", Verified.AS_COMPILED),
        pytest.param(
            *({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}, "AArch64"),
            Verified.COMPILED_AGAIN,
            marks=pytest.mark.slow,  # the first linking for another architecture compiles a C library
        ),
    ],
)
def test_a_stage_for_another_cpu(
    model: tvm_split.Model, target: dict[str, str], expected: str, verified: Verified, tmp_path: Path
) -> None:
    cluster = Cluster((Machine("machine-a"), Machine("machine-b", target=target)), launcher=Local())
    planned = tvm_split.plan(model, cluster, split=SPLIT)
    # It is verified too: a stage that cannot run here is also compiled for this host, and the bundle says so.
    bundle = tvm_split.compile(model, planned)
    assert machine_of(bundle.blob_path(bundle.program.stages[1].library.sha256)) == expected
    assert bundle.verified is verified
    bundle.save(tmp_path / "bundle")
    assert tvm_split.Bundle.load(tmp_path / "bundle").verified is verified
    assert tvm_split.compile(model, planned, verify=False).verified is Verified.NO


def test_a_cuda_target_needs_its_architecture(model: tvm_split.Model) -> None:
    cluster = Cluster((Machine("machine-a"), Machine("machine-b", target={"kind": "cuda"})), launcher=Local())
    with pytest.raises(tvm_split.ClusterError, match=r"machine 'machine-b': the target .* names no architecture"):
        tvm_split.plan(model, cluster, split=SPLIT)
