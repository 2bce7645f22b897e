"""A CPU's target follows from what the processor can execute, and not from what its model is called."""

import pytest
import torch
from hypothesis import given, strategies as st

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.hardware import DISABLED_FEATURES_VARIABLE, features_in
from schedules.traits import traits_of
from tests.helpers.recorded_processors import NAMES, recorded
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.targets import cannot_execute, cpu_target, host_target, target_text, tvm_target

EXPECTED = {
    "alderlake-i7-1260p": "x86-64-v3+avxvnni",
    "ampere-altra-a1-oracle-vm-neoverse-n1": "generic+fullfp16+dotprod",
    "apple-m1-docker-desktop": "generic+fp16fml+dotprod",
    "emeraldrapids-8575c-vm-no-amx": "x86-64-v4+avx512bf16+avx512vnni+avx512vbmi",
    "goldmontplus-pentium-n5000-no-avx": "x86-64-v2+movbe",
    "graviton3-neoverse-v1": "generic+sve+i8mm+bf16+fp16fml+dotprod",
    "haswell-e5-2680v3-bare-metal": "x86-64-v3",
    "kabylake-pentium-g4560-no-avx": "x86-64-v2+lzcnt+movbe",
    "knightslanding-phi7210": "x86-64-v3+avx512cd",
    "kvm64-common-kvm-processor": "x86-64",
    "qemu64-virtual-cpu-2.5": "x86-64",
    "raspberrypi4-aarch64-cortex-a72": "generic",
    "raspberrypi4-armv7l-cortex-a72": "generic+vfp4",
    "sandybridge-e5-2670": "x86-64-v2+avx",
    "sapphirerapids-8480-bare-metal-amx": "x86-64-v4+avx512fp16+avx512bf16+avx512vnni+avx512vbmi+avxvnni",
    "skylake-sp-gold6132": "x86-64-v4",
    "virtualbox-i7-6700hq-avx-no-avx2": "x86-64-v2+avx+lzcnt+movbe",
    "virtualbox-i7-8750h-avx2-no-fma-bmi": "x86-64-v2+avx2+lzcnt+movbe",
    "zen3-epyc7763-github-runner": "x86-64-v3",
    "zen4-epyc9v74-github-runner-avx512": "x86-64-v4+avx512bf16+avx512vnni+avx512vbmi",
    "zen4-epyc9v74-github-runner-no-avx512": "x86-64-v3",
    "zen5-epyc-vm-no-rdseed": "znver5",
}
LANES = {"znver5": 16, "x86-64-v4": 16, "x86-64-v3": 8, "x86-64-v2": 4, "x86-64": 4}


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_recorded_machines(name: str) -> None:
    architecture, text = recorded(name)
    features = features_in(text, architecture)
    target = cpu_target(architecture, features, 4)
    assert target_text(target) == EXPECTED[name]
    assert target["num-cores"] == 4
    assert cannot_execute(target, architecture, features) == ""
    assert cpu_target(architecture, sorted(features, reverse=True), 4) == target
    tvm_target(target)  # LLVM knows every part of it


@pytest.mark.parametrize("name", [name for name in NAMES if recorded(name)[0] == "x86_64"])
def test_vector_lanes_match_the_processors_registers(name: str) -> None:
    architecture, text = recorded(name)
    target = tvm_target(cpu_target(architecture, features_in(text, architecture), 1))
    exceptions = {"knightslanding-phi7210": 16, "virtualbox-i7-8750h-avx2-no-fma-bmi": 8}
    assert traits_of(target).lanes == exceptions.get(name, LANES[EXPECTED[name].partition("+")[0]])


@given(st.sampled_from(NAMES), st.data())
def test_hidden_instruction_sets_are_not_used(name: str, data: st.DataObject) -> None:
    architecture, text = recorded(name)
    features = features_in(text, architecture)
    hidden = data.draw(st.sets(st.sampled_from(sorted(features)), max_size=12))
    # Every processor of the architecture has these.
    remaining = features - hidden | features & {"cmov", "mmx", "sse", "sse2", "fp", "asimd", "vfpv3", "neon"}
    assert cannot_execute(cpu_target(architecture, remaining, 1), architecture, remaining) == ""


def test_amx_is_never_used_by_default() -> None:
    """An AMX instruction ends a process that has not requested AMX, whatever /proc/cpuinfo lists."""
    architecture, text = recorded("sapphirerapids-8480-bare-metal-amx")
    features = features_in(text, architecture)
    assert "amx_tile" in features
    target = {**cpu_target(architecture, features, 1), "mtriple": "x86_64-linux-gnu"}
    # The target must not need any AMX feature.
    without = {feature for feature in features if not feature.startswith("amx")}
    assert cannot_execute(target, architecture, without) == ""
    with_amx = {**target, "mattr": [*target["mattr"], "+amx-bf16"]}
    assert "amx_bf16" in cannot_execute(with_amx, architecture, without)


@pytest.mark.parametrize("architecture", ["armvEVIL", "aarch64evil", "riscv64", "nonsense", "armv7l; rm", ""])
def test_an_invalid_architecture_of_a_worker_gives_a_generic_target(architecture: str) -> None:
    target = cpu_target(architecture, ["neon", "avx512f"], 1)
    assert target_text(target) == "generic"


HIDDEN = "avx avx2 fma avx512f avx512bw avx512dq avx512vl avx512cd asimddp sve"


def test_a_worker_with_disabled_features_gets_what_it_can_execute() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
    x = torch.randn(4, 64)
    names = ("full", "masked")
    with (
        LocalWorkers(names[:1]) as full,
        LocalWorkers(names[1:], environment={DISABLED_FEATURES_VARIABLE: HIDDEN}) as masked,
    ):
        endpoints = {**full.endpoints, **masked.endpoints}
        cluster = tvm_split.Cluster(tuple(Machine(name, endpoint=endpoints[name]) for name in names))
        split = {"full": ["0"], "masked": ["2"]}
        with tvm_split.compile_and_deploy(network, (x,), cluster, split=split) as deployment:
            targets = {machine.name: dict(machine.target) for machine in deployment.bundle.plan.machines}
            assert targets["full"] == host_target(1)
            assert "avx" not in target_text(targets["masked"])
            (y,) = deployment.run(x)
    assert abs(y - network(x).detach().numpy()).max() < 1e-4
