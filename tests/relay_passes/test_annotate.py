from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.helpers.placements import STAGE_OF, placement
from tvm_split.relay_passes.annotate import AnnotateDevices
from tvm_split.relay_passes.errors import ContractError, SelfWaitError


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
            R.func_attr(
                {
                    "stages": [
                        {"first": "x_on_machine_a", "machine": "machine-a", "name": "stage_0"},
                        {"first": "conv1_on_machine_b", "machine": "machine-b", "name": "stage_1"},
                    ]
                }
            )
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

    after = AnnotateDevices(placement({"conv1": 0, "conv2": 1, "conv3": 1}, ("a", "b")))(Before)
    tvm.ir.assert_structural_equal(after, Expected)


def test_each_value_is_on_the_machine_of_its_stage(whole: tvm.IRModule) -> None:
    after = AnnotateDevices(placement())(whole)
    devices = {
        binding.var.name: binding.var.ty.vdevice.memory_scope
        for binding in after["main"].body.blocks[0].bindings
        if getattr(binding.var.ty, "vdevice", None) is not None
    }
    for name, stage in STAGE_OF.items():
        if name in devices:
            assert devices[name] == ("machine-a", "machine-b", "machine-a")[stage], name


def test_value_without_inputs_is_made_where_it_is_needed(whole: tvm.IRModule) -> None:
    text = AnnotateDevices(placement())(whole).script()
    assert text.count("R.ones(") == 1
    assert "mask_on_" not in text


def test_a_stage_that_needs_a_later_one_is_refused(whole: tvm.IRModule) -> None:
    circular = {**STAGE_OF, "skip": 0}
    with pytest.raises(SelfWaitError, match=r"'skip' in stage_0 needs 'joined', which is computed in stage_1"):
        AnnotateDevices(placement(circular))(whole)


def test_a_tuple_that_crosses_is_refused(whole: tvm.IRModule) -> None:
    with pytest.raises(ContractError, match=r"'halves' is a .* not a tensor"):
        AnnotateDevices(placement({**STAGE_OF, "left": 1}))(whole)


def test_an_unplaced_variable_is_refused(whole: tvm.IRModule) -> None:
    with pytest.raises(ContractError, match="names no stage for 'joined'"):
        AnnotateDevices(placement({name: stage for name, stage in STAGE_OF.items() if name != "joined"}))(whole)


def test_a_stage_without_operations_is_refused(whole: tvm.IRModule) -> None:
    with pytest.raises(ContractError, match="'stage_3' has no operation"):
        AnnotateDevices(placement(machines=("a", "b", "a", "c")))(whole)
