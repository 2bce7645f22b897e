"""Instructions of a target against those of a processor: a bundle for another CPU is refused before it is sent."""

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_split
from rpc_runtime.hardware import cpu_features
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import launcher_at
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.machine_targets import require_known_targets
from tvm_split.compiler.targets import cannot_execute, host_target, runs_here, tvm_target
from tvm_split.profiling.cluster_profile import profile_model

X = torch.ones(1, 8)
V2 = frozenset(["cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3", "pni", "cmov", "mmx", "sse", "sse2"])
V3 = V2 | frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"])
V4 = V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
PI_4 = frozenset(["fp", "asimd", "evtstrm", "crc32", "cpuid"])
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}


@pytest.mark.parametrize(
    ("target", "architecture", "features", "expected"),
    [
        ({**X86, "mcpu": "x86-64-v4"}, "x86_64", V4, ""),
        ({**X86, "mcpu": "x86-64-v3"}, "x86_64", V2, "has no abm, avx, avx2, bmi1, bmi2, f16c, fma, movbe"),
        ({**X86, "mcpu": "x86-64-v4", "mattr": ["-avx512cd"]}, "x86_64", V4 - {"avx512cd"}, ""),
        ({**X86, "mcpu": "x86-64-v4", "mattr": ["+avx512vnni"]}, "x86_64", V4, "has no avx512_vnni"),
        ({**X86, "mcpu": "x86-64-v4"}, "x86_64", frozenset(), ""),
        ({**ARM, "mcpu": "cortex-a72"}, "aarch64", PI_4, ""),
        ({**ARM, "mcpu": "neoverse-n1"}, "aarch64", PI_4, "has no asimddp, asimdhp, asimdrdm, atomics"),
        ({**ARM, "mcpu": "cortex-a72"}, "x86_64", V4, "is x86_64, not aarch64"),
        ({**X86, "mtriple": "amd64-linux-gnu", "mcpu": "x86-64-v2"}, "x86_64", V2, ""),
        ({"kind": "cuda", "arch": "sm_90", "host": {**X86, "mcpu": "x86-64-v4"}}, "x86_64", V3, "has no avx512bw"),
        ({"kind": "cuda", "arch": "sm_90"}, platform.machine(), cpu_features(), ""),
    ],
)
def test_what_is_lacking(target: dict[str, Any], architecture: str, features: frozenset[str], expected: str) -> None:
    reason = cannot_execute(target, architecture, features)
    assert reason.startswith(expected)
    assert bool(reason) == bool(expected)


def test_this_host_runs_code_for_itself() -> None:
    assert runs_here(host_target(1))


# Only AMD had "tbm", until 2016. Both names are LLVM's and Linux's, and neither implies another that a host may lack.
MISSING = "tbm" if platform.machine() == "x86_64" else "sve2"
BEYOND = {"kind": "llvm", "mattr": [f"+{MISSING}"]}
lacks_it = pytest.mark.skipif(MISSING in cpu_features(), reason=f"this host has {MISSING}")


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    return tvm_split.load_model(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).eval(), (X,))


SPLIT = {"machine-a": ["0"], "machine-b": ["1"]}


def beyond(launcher: str) -> Cluster:
    machines = Machine("machine-a"), Machine("machine-b", target=BEYOND)
    return Cluster(machines, launcher=launcher_at(launcher))


@lacks_it
@pytest.mark.parametrize("launcher", ["local", "in-process"])
def test_a_stage_for_another_cpu_is_refused_before_it_is_sent(model: tvm_split.Model, launcher: str) -> None:
    cluster = beyond(launcher)
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=SPLIT), verify=False)
    sent: list[str] = []
    with pytest.raises(tvm_split.ClusterError) as caught:
        tvm_split.deploy(bundle, cluster, on_transfer=lambda machine, *_: sent.append(machine))
    for words in ("stage_1 on 'machine-b'", f"has no {MISSING}", "leave its target out, and compile again"):
        assert words in str(caught.value)
    assert sent == []
    local_plan = dataclasses.replace(
        bundle.plan,
        machines=tuple(dataclasses.replace(machine, target=host_target(1)) for machine in bundle.plan.machines),
    )
    with tvm_split.deploy(tvm_split.compile(model, local_plan), cluster) as deployment:
        deployment.run(X)


@lacks_it
@pytest.mark.parametrize("launcher", ["local", "in-process"])
def test_kernels_for_another_cpu_are_not_timed(model: tvm_split.Model, launcher: str) -> None:
    with pytest.raises(tvm_split.ClusterError, match=f"on 'machine-b' .* has no {MISSING}"):
        profile_model(model, beyond(launcher))


@pytest.mark.parametrize(
    ("target", "unknown"),
    [
        ({**X86, "mattr": ["+avx2", "+nonsense"]}, "feature '+nonsense' of x86_64-linux-gnu"),
        ({**ARM, "mattr": ["+avx2"]}, "feature '+avx2' of aarch64-linux-gnu"),
        ({"kind": "cuda", "arch": "sm_90", "host": {**X86, "mattr": ["+neon"]}}, "feature '+neon' of x86_64-linux-gnu"),
        ({**X86, "mcpu": "znver99"}, "CPU 'znver99' for x86_64-linux-gnu"),
        ({**ARM, "mcpu": "x86-64-v3"}, "CPU 'x86-64-v3' for aarch64-linux-gnu"),
        ({"kind": "llvm", "mtriple": "abacus-linux-gnu"}, "CPU 'generic' for abacus-linux-gnu"),
    ],
)
def test_cpus_and_features_that_llvm_does_not_know(
    tmp_path: Path, target: dict[str, Any], unknown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"machines:\n- name: box\n  address: box:1\n  target: {json.dumps(target)}\n")
    with pytest.raises(tvm_split.ClusterError) as caught:
        require_known_targets(Cluster.from_yaml(path))
    assert str(caught.value).startswith(f"{path}:4: machine 'box': LLVM knows no {unknown}; ")
    assert capfd.readouterr().err == ""  # neither from LLVM itself
    os.write(2, b"ours")
    assert capfd.readouterr().err == "ours"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({**X86, "mattr": ["-64bit"]}, "has no 64bit"),
        ({**X86, "mattr": ["+avx2,-64bit-mode"]}, "has no 64bit-mode"),
        ({**X86, "mattr": ["-sse"]}, "has no sse2"),
        ({**X86, "mattr": ["+soft-float"]}, "has soft-float"),
        ({**X86, "mattr": ["+16bit-mode"]}, "has 16bit-mode"),
        ({**X86, "mcpu": "i686"}, "has no 64bit"),
        ({**ARM, "mattr": ["-fp-armv8"]}, "has no fp-armv8, no neon"),
        ({"kind": "cuda", "arch": "sm_90", "host": {**X86, "mattr": ["-sse2"]}}, "has no sse2"),
        ({"kind": "llvm", "mtriple": "x86_64-pc-windows-msvc"}, "is of another system"),
        ({"kind": "llvm", "mtriple": "aarch64-apple-darwin"}, "is of another system"),
        ({**X86, "num-cores": 0}, "has 0 num-cores; give a number from 1 to "),
        ({**X86, "num-cores": 10**12}, "has 1000000000000 num-cores; give a number from 1 to "),
    ],
)
def test_targets_that_llvm_cannot_compile_for(tmp_path: Path, target: dict[str, Any], problem: str) -> None:
    """It would end the process, or compile code that crashes."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"machines:\n- name: box\n  address: box:1\n  target: {json.dumps(target)}\n")
    with pytest.raises(tvm_split.ClusterError) as caught:
        require_known_targets(Cluster.from_yaml(path))
    assert str(caught.value).startswith(f"{path}:4: machine 'box': the target ")
    assert problem in str(caught.value)


@pytest.mark.parametrize("mattr", [[], ["+avx2", "-fma"], ["+avx2,+fma"], ["+retpoline"]])
def test_features_that_llvm_knows(mattr: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert tvm_target({**X86, "mattr": mattr}).attrs["mattr"] == mattr
    assert capfd.readouterr().err == ""
