from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.helpers.placements import placement
from tvm_split.relay_passes.annotate import AnnotateDevices
from tvm_split.relay_passes.errors import ContractError
from tvm_split.relay_passes.partition import PartitionStages, stage_functions


@pytest.fixture
def partitioned(whole: tvm.IRModule) -> tvm.IRModule:
    return PartitionStages()(AnnotateDevices(placement())(whole))


def test_stage_holds_what_it_needs_and_returns_what_others_need(partitioned: tvm.IRModule) -> None:
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
        def stage_2(
            joined: R.Tensor((1, 16), "float32", vdevice="llvm:0:machine-a"),
            conv1: R.Tensor((1, 16), "float32", vdevice="llvm:0:machine-a"),
        ):
            R.func_attr({"machine": "machine-a"})
            with R.dataflow():
                skip = R.add(joined, conv1)
                outputs = (skip,)
                R.output(outputs)
            return outputs

    tvm.ir.assert_structural_equal(partitioned["stage_2"], Expected["stage_2"])


def test_borders(partitioned: tvm.IRModule) -> None:
    stages = stage_functions(partitioned)
    assert [str(stage.attrs["machine"]) for stage in stages] == ["machine-a", "machine-b", "machine-a"]
    assert [[each.name for each in stage.params] for stage in stages] == [
        ["x"],
        ["left", "y", "right"],
        ["joined", "conv1"],
    ]
    returned = [[field.name for field in stage.body.blocks[-1].bindings[-1].value.fields] for stage in stages]
    assert [sorted(names) for names in returned] == [["conv1", "left", "right"], ["joined", "other"], ["skip"]]


def test_main_transfers_each_tensor_once_per_machine(partitioned: tvm.IRModule) -> None:
    transfers = [line for line in partitioned["main"].script().splitlines() if "R.to_vdevice" in line]
    assert [line.strip().partition(":")[0] for line in transfers] == [
        "x_on_machine_a",
        "left_on_machine_b",
        "y_on_machine_b",
        "right_on_machine_b",
        "joined_on_machine_a",
    ]


def test_a_graph_that_is_not_annotated_is_refused(whole: tvm.IRModule) -> None:
    with pytest.raises(ContractError, match="run AnnotateDevices first"):
        PartitionStages()(whole)
