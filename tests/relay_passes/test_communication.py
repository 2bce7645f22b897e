import re
from dataclasses import replace

import tvm
from tvm.relax.global_info import VDevice

from relay_passes.communication import Parts, annotated_module, machine_modules, virtual_devices
from tests.helpers.placements import LLVM, Whole, partition

OUTPUTS = ("skip", "x", "other", "y", "other")


def devices(parts: Parts) -> dict[str, VDevice]:
    return virtual_devices(parts, {machine: LLVM for stage, _ in parts for machine in stage.machines})


def shown(parts: Parts) -> dict[str, tvm.IRModule]:
    return machine_modules(parts, OUTPUTS, devices(parts))


def calls_of(module: tvm.IRModule) -> list[str]:
    lines = [line.strip().partition(", ty_args")[0] for line in module.script().splitlines()]
    return [line.partition(" = ")[2] or line for line in lines if "call_packed" in line]


def test_crossings_become_transfers() -> None:
    parts = partition(Whole)
    annotated = annotated_module(Whole["main"].params, (), parts, OUTPUTS, devices(parts)).script()
    crossing = re.findall(r"(\w+): .* = R\.to_vdevice\((\w+),.*:(machine-.)", annotated)
    # Two operations of machine-b need left; it crosses once.
    crossed = [("x", "a"), ("left", "b"), ("y", "b"), ("right", "b"), ("joined", "a")]
    assert crossing == [(f"{name}_on_machine_{letter}", name, f"machine-{letter}") for name, letter in crossed]


def test_machines_read_like_what_they_do() -> None:
    modules = shown(partition(Whole))
    assert list(modules) == ["machine-a", "machine-b"]
    assert calls_of(modules["machine-b"]) == [
        'R.call_packed("tvm_split.receive", R.str("left"), R.str("machine-a")',
        'R.call_packed("tvm_split.receive", R.str("y"), R.str("client")',
        'R.call_packed("tvm_split.receive", R.str("right"), R.str("machine-a")',
        'R.call_packed("tvm_split.send", joined, R.str("joined"), R.str("machine-a")',
        'R.call_packed("tvm_split.send", other, R.str("other"), R.str("client")',
    ]


def test_replicas_read_like_the_stage_on_their_own_machines() -> None:
    first, (alone, computation), last = partition(Whole)
    replicated = replace(alone, machines=("machine-b", "machine-c"), shares=(2 / 3, 1 / 3))
    modules = shown([first, (replicated, computation), last])
    assert list(modules) == ["machine-a", "machine-b", "machine-c"]
    on_b, on_c = (modules[machine].script() for machine in ("machine-b", "machine-c"))
    for replica, (text, machine) in enumerate([(on_b, "machine-b"), (on_c, "machine-c")]):
        assert f'R.func_attr({{"machine": "{machine}", "replica": {replica}, "replica_schedule": [0, 1, 0]}})' in text
        assert f'left: R.Tensor((1, 8), dtype="float32", vdevice="llvm:{replica + 1}:{machine}")' in text
    calls = calls_of(modules["machine-a"])
    assert 'R.call_packed("tvm_split.send", left, R.str("left"), R.str("machine-b or machine-c")' in calls
    assert 'R.call_packed("tvm_split.receive", R.str("joined"), R.str("machine-b or machine-c")' in calls
