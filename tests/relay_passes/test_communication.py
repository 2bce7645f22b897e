from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm

from tests.helpers.placements import LLVM, placement, run
from tvm_split.relay_passes.annotate import AnnotateDevices
from tvm_split.relay_passes.communication import computation, machine_modules
from tvm_split.relay_passes.partition import PartitionStages
from tvm_split.relay_passes.placement import PlacedStage
from tvm_split.relay_passes.verify_partition import VerifyPartition


def test_machines_read_like_what_they_do(whole: tvm.IRModule) -> None:
    modules = machine_modules(PartitionStages()(AnnotateDevices(placement())(whole)))
    assert list(modules) == ["machine-a", "machine-b"]
    text = modules["machine-b"].script()
    lines = [line.strip().partition(", ty_args")[0] for line in text.splitlines()]
    calls = [line.partition(" = ")[2] or line for line in lines if "call_packed" in line]
    assert calls == [
        'R.call_packed("tvm_split.receive", R.str("left"), R.str("machine-a")',
        'R.call_packed("tvm_split.receive", R.str("y"), R.str("client")',
        'R.call_packed("tvm_split.receive", R.str("right"), R.str("machine-a")',
        'R.call_packed("tvm_split.send", joined, R.str("joined"), R.str("machine-a")',
        'R.call_packed("tvm_split.send", other, R.str("other"), R.str("client")',
    ]


def test_a_machine_hands_over_to_its_own_later_stage(whole: tvm.IRModule) -> None:
    text = machine_modules(PartitionStages()(AnnotateDevices(placement())(whole)))["machine-a"].script()
    assert 'R.call_packed("tvm_split.send", conv1, R.str("conv1"), R.str("machine-a")' in text
    assert 'R.call_packed("tvm_split.receive", R.str("conv1"), R.str("machine-a")' in text


def test_computations_called_in_turn_give_the_whole(whole: tvm.IRModule) -> None:
    modules = machine_modules(PartitionStages()(AnnotateDevices(placement())(whole)))
    parts = [
        computation(function)
        for module in modules.values()
        for _, function in sorted(module.functions_items(), key=lambda item: item[0].name_hint)
    ]
    generator = np.random.default_rng(0)
    values = {
        "x": generator.standard_normal((1, 16)).astype("float32"),
        "y": generator.standard_normal((1, 8)).astype("float32"),
    }
    expected = run(whole, values["x"], values["y"])
    for part in sorted(parts, key=lambda each: each.name):
        function = part.function.with_attr("global_symbol", "main")
        results = run(tvm.IRModule({"main": function}), *[values[name] for name in part.received])
        values.update(zip(part.sent, results, strict=True))
    for name, right in zip(["skip", "x", "other", "y", "other"], expected, strict=True):
        np.testing.assert_array_equal(values[name], right)


def test_a_computation_is_on_no_device(whole: tvm.IRModule) -> None:
    modules = machine_modules(PartitionStages()(AnnotateDevices(placement())(whole)))
    for module in modules.values():
        for _, function in module.functions_items():
            assert "vdevice" not in computation(function).function.script()


def test_replicas_read_like_the_stage_on_their_own_machines(whole: tvm.IRModule) -> None:
    alone = placement()
    replicated = PlacedStage("stage_1", "machine-b", ("machine-b", "machine-c"), (0, 1, 0))
    targets = {**alone.targets, "machine-c": LLVM}
    placed = replace(alone, stages=(alone.stages[0], replicated, alone.stages[2]), targets=targets)
    partitioned = PartitionStages()(AnnotateDevices(placed)(whole))
    VerifyPartition(whole)(partitioned)
    modules = machine_modules(partitioned)
    assert list(modules) == ["machine-a", "machine-b", "machine-c"]
    on_b, on_c = (modules[machine].script() for machine in ("machine-b", "machine-c"))
    for replica, (text, machine) in enumerate([(on_b, "machine-b"), (on_c, "machine-c")]):
        assert f'R.func_attr({{"machine": "{machine}", "replica": {replica}, "turns": [0, 1, 0]}})' in text
        assert f'left: R.Tensor((1, 8), dtype="float32", vdevice="llvm:{replica + 1}:{machine}")' in text
    on_a = modules["machine-a"].script()
    assert 'R.call_packed("tvm_split.send", left, R.str("left"), R.str("machine-b or machine-c")' in on_a
    assert 'R.call_packed("tvm_split.receive", R.str("joined"), R.str("machine-b or machine-c")' in on_a
    pure = [computation(modules[machine]["stage_1"]).function for machine in ("machine-b", "machine-c")]
    tvm.ir.assert_structural_equal(*pure)
