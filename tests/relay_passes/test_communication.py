from __future__ import annotations

from dataclasses import replace

import tvm
from tvm.relax.global_info import VDevice
from tvm.script import ir as I, relax as R

from relay_passes.communication import Parts, annotated_module, machine_modules, virtual_devices
from tests.helpers.placements import LLVM, partition

OUTPUTS = ("skip", "x", "other", "y", "other")


def devices(parts: Parts) -> dict[str, VDevice]:
    return virtual_devices(parts, {machine: LLVM for stage, _ in parts for machine in stage.machines})


def shown(parts: Parts) -> dict[str, tvm.IRModule]:
    return machine_modules(parts, OUTPUTS, devices(parts))


def annotated(whole: tvm.IRModule) -> tvm.IRModule:
    parts = partition(whole)
    return annotated_module(whole["main"].params, (), parts, OUTPUTS, devices(parts))


def calls_of(module: tvm.IRModule) -> list[str]:
    lines = [line.strip().partition(", ty_args")[0] for line in module.script().splitlines()]
    return [line.partition(" = ")[2] or line for line in lines if "call_packed" in line]


def test_crossings_become_transfers() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4), "float32")):
            with R.dataflow():
                conv1 = R.nn.relu(x)
                conv2 = R.add(conv1, conv1)
                conv3 = R.multiply(conv2, conv1)
                result = (conv3,)
                R.output(result)
            return result

    @I.ir_module
    class Expected:
        I.module_global_infos(
            {
                "vdevice": [
                    I.vdevice({"kind": "llvm"}, 0, "machine-a"),
                    I.vdevice({"kind": "llvm"}, 1, "machine-b"),
                ]
            }
        )

        @R.function
        def main(x: R.Tensor((1, 4), "float32")):
            with R.dataflow():
                x_on_machine_a = R.to_vdevice(x, "llvm:0:machine-a")
                conv1 = R.nn.relu(x_on_machine_a)
                # Two operations of machine-b need conv1; it crosses once.
                conv1_on_machine_b = R.to_vdevice(conv1, "llvm:1:machine-b")
                conv2 = R.add(conv1_on_machine_b, conv1_on_machine_b)
                conv3 = R.multiply(conv2, conv1_on_machine_b)
                result = (conv3,)
                R.output(result)
            return result

    parts = partition(Before, {"conv1": 0, "conv2": 1, "conv3": 1}, "ab")
    after = annotated_module(Before["main"].params, (), parts, ("conv3",), devices(parts))
    tvm.ir.assert_structural_equal(after, Expected)


def test_machines_read_like_what_they_do(whole: tvm.IRModule) -> None:
    modules = shown(partition(whole))
    assert list(modules) == ["machine-a", "machine-b"]
    assert calls_of(modules["machine-b"]) == [
        'R.call_packed("tvm_split.receive", R.str("left"), R.str("machine-a")',
        'R.call_packed("tvm_split.receive", R.str("y"), R.str("client")',
        'R.call_packed("tvm_split.receive", R.str("right"), R.str("machine-a")',
        'R.call_packed("tvm_split.send", joined, R.str("joined"), R.str("machine-a")',
        'R.call_packed("tvm_split.send", other, R.str("other"), R.str("client")',
    ]


def test_replicas_read_like_the_stage_on_their_own_machines(whole: tvm.IRModule) -> None:
    first, (alone, computation), last = partition(whole)
    replicated = replace(alone, machines=("machine-b", "machine-c"), shares=(2 / 3, 1 / 3))
    modules = shown([first, (replicated, computation), last])
    assert list(modules) == ["machine-a", "machine-b", "machine-c"]
    on_b, on_c = (modules[machine].script() for machine in ("machine-b", "machine-c"))
    for replica, (text, machine) in enumerate([(on_b, "machine-b"), (on_c, "machine-c")]):
        assert f'R.func_attr({{"machine": "{machine}", "replica": {replica}, "turns": [0, 1, 0]}})' in text
        assert f'left: R.Tensor((1, 8), dtype="float32", vdevice="llvm:{replica + 1}:{machine}")' in text
    calls = calls_of(modules["machine-a"])
    assert 'R.call_packed("tvm_split.send", left, R.str("left"), R.str("machine-b or machine-c")' in calls
    assert 'R.call_packed("tvm_split.receive", R.str("joined"), R.str("machine-b or machine-c")' in calls
