"""Plans as ONNX's multi-device annotations, written and read."""

import dataclasses
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import tvm_split
from tests.models.onnx_models import LIGHT_MODELS
from tests.models.small_onnx_model import small_model
from tvm_split.errors import PlanError
from tvm_split.frontends.onnx.annotations import (
    CONFIGURATION,
    read_model,
    save_model,
    split_from_annotations,
    write_annotations,
)
from tvm_split.placement.plan import Plan

A, B = "machine-a", "machine-b"
SPLIT = {A: ["conv_1", "relu_1"], B: ["conv_2", "flatten", "dense"]}
CLUSTER = tvm_split.Cluster.in_process(machines=3, threads=1)


def planned(proto: Any, **options: Any) -> tuple[tvm_split.Model, Plan]:
    model = tvm_split.load_model(proto)
    return model, tvm_split.plan(model, CLUSTER, **options)


def annotated(stages: list[int | None], devices: list[str] | None = None, count: int = 2) -> Any:
    """The small network with annotations of another tool."""
    proto = small_model()
    proto.ir_version = 11
    proto.configuration.add(name="theirs", num_devices=count, device=[A, B] if devices is None else devices)
    for node, stage in zip(proto.graph.node, stages, strict=True):
        if stage is not None:
            node.device_configurations.add(configuration_id="theirs", pipeline_stage=stage)
    return proto


def calls() -> Any:
    """``first`` and ``second`` call the same function of two nodes."""
    opsets = [helper.make_opsetid("", 18)]
    body = [helper.make_node("Relu", ["x"], ["t"], name="r"), helper.make_node("Neg", ["t"], ["y"], name="n")]
    function = helper.make_function("mine", "Both", ["x"], ["y"], body, opsets)
    nodes = [
        helper.make_node("Both", ["x"], ["a"], name="first", domain="mine"),
        helper.make_node("Both", ["a"], ["b"], name="second", domain="mine"),
        helper.make_node("Abs", ["b"], ["z"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xz"]
    graph = helper.make_graph(nodes, "calls", values[:1], values[1:])
    return helper.make_model(
        graph, functions=[function], opset_imports=[*opsets, helper.make_opsetid("mine", 1)], ir_version=10
    )


def stages_of(proto: Any) -> list[int]:
    return [node.device_configurations[0].pipeline_stage for node in proto.graph.node]


def test_what_is_written() -> None:
    proto = small_model()
    before = proto.SerializeToString()
    _, plan = planned(proto, split=SPLIT)
    written = write_annotations(proto, plan)
    onnx.checker.check_model(written, full_check=True)
    assert proto.SerializeToString() == before
    assert written.ir_version == 11
    (configuration,) = written.configuration
    assert (configuration.name, configuration.num_devices, list(configuration.device)) == (CONFIGURATION, 2, [A, B])
    assert stages_of(written) == [0, 0, 1, 1, 1]
    assert not written.graph.node[0].device_configurations[0].sharding_spec
    assert split_from_annotations(written) == SPLIT


@pytest.mark.parametrize(
    "name", ["light_resnet50", pytest.param("light_inception_v2", marks=pytest.mark.long), "light_shufflenet"]
)
def test_a_plan_comes_back_from_its_annotations(name: str) -> None:
    proto = onnx.load(LIGHT_MODELS / f"{name}.onnx")  # with weights that nodes make, which importing computes away
    model, plan = planned(proto)
    written = write_annotations(proto, plan)
    onnx.checker.check_model(written)
    assert all(len(node.device_configurations) == 1 for node in written.graph.node)
    again = tvm_split.load_model(written)
    assert again.layer_names == model.layer_names
    split = split_from_annotations(written, again.layer_names)
    assert tvm_split.plan(again, CLUSTER, split=split).stages == plan.stages


def test_a_machine_with_two_stages_is_named_by_device() -> None:
    proto = small_model()
    _, plan = planned(proto, split={A: ["conv_1", "dense"], B: ["conv_2"]})
    assert [stage.machine for stage in plan.stages] == [A, B, A]
    written = write_annotations(proto, plan)
    onnx.checker.check_model(written, full_check=True)
    assert stages_of(written) == [0, 0, 1, 1, 2]
    assert list(written.graph.node[4].device_configurations[0].sharding_spec[0].device) == [0]
    split = split_from_annotations(written)
    assert split == {A: ["conv_1", "relu_1", "dense"], B: ["conv_2", "flatten"]}


def test_writing_again_replaces_only_its_own() -> None:
    proto = annotated([0, 0, 0, 1, 1])
    _, plan = planned(proto, split=SPLIT)
    twice = write_annotations(write_annotations(proto, plan), plan)
    assert [entry.name for entry in twice.configuration] == ["theirs", CONFIGURATION]
    assert [len(node.device_configurations) for node in twice.graph.node] == [2] * 5
    assert split_from_annotations(twice, configuration=CONFIGURATION) == SPLIT
    assert split_from_annotations(twice, configuration="theirs")[A] == ["conv_1", "relu_1", "conv_2"]
    with pytest.raises(PlanError, match="2 device configurations: 'theirs', 'tvm-split'"):
        split_from_annotations(twice)


def test_nodes_computed_away_go_where_they_are_needed() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Shape", ["r"], ["s"], name="shape"),
        helper.make_node("Identity", ["s"], ["i"], name="copy"),
        helper.make_node("Neg", ["r"], ["n"], name="neg"),
        helper.make_node("Reshape", ["n", "i"], ["y"], name="reshape"),
        helper.make_node("Relu", ["x"], ["dead"], name="dead"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    proto = helper.make_model(
        helper.make_graph(nodes, "shapes", values[:1], values[1:]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    model, plan = planned(proto, split={A: ["relu"], B: ["neg"]})
    assert "shape" not in model.layer_names
    written = write_annotations(proto, plan)
    assert stages_of(written) == [0, 1, 1, 1, 1, 1]
    split = split_from_annotations(written, model.layer_names)
    assert split == {A: ["relu"], B: ["neg", "reshape"]}
    assert "shape" in split_from_annotations(written)[B]


def test_calls_of_functions() -> None:
    proto = calls()
    model, plan = planned(proto, split={A: ["r__1", "n__1"], B: ["r__2"]})
    written = write_annotations(proto, plan)
    onnx.checker.check_model(written)
    assert stages_of(written) == [0, 1, 1]
    assert split_from_annotations(written, model.layer_names) == {A: ["r__1", "n__1"], B: ["r__2", "n__2", "Abs_4"]}
    _, torn = planned(proto, split={A: ["r__1"], B: ["n__1"]})
    with pytest.raises(PlanError, match="'first' calls a function whose layers lie in stage_0 and stage_1"):
        write_annotations(proto, torn)


@pytest.mark.parametrize(
    ("stages", "split"),
    [
        ([0, None, 1, None, None], SPLIT),
        ([None, 0, 1, 1, 1], SPLIT),
        ([1, 1, 2, 2, 2], SPLIT),  # counted from 1
        ([1, 1, 1, 1, 1], {B: ["conv_1", "relu_1", "conv_2", "flatten", "dense"]}),
        ([1, 1, 1, 0, 0], {B: ["conv_1", "relu_1", "conv_2"], A: ["flatten", "dense"]}),
    ],
)
def test_what_is_read(stages: list[int | None], split: dict[str, list[str]]) -> None:
    assert split_from_annotations(annotated(stages)) == split


def test_devices_without_names_are_the_machines_in_order() -> None:
    proto = annotated([0, 0, 1, 1, 1], devices=[])
    assert split_from_annotations(proto, machines=[A, B, "machine-c"]) == SPLIT
    with pytest.raises(PlanError, match="2 devices, but there are only 1 names"):
        split_from_annotations(proto, machines=[A])


def test_what_cannot_be_read() -> None:
    with pytest.raises(PlanError, match="no device configuration, so it says nothing"):
        split_from_annotations(small_model())
    with pytest.raises(PlanError, match="no device configuration 'mine'; it has 'theirs'"):
        split_from_annotations(annotated([0] * 5), configuration="mine")
    with pytest.raises(PlanError, match="no node of the model is annotated"):
        split_from_annotations(annotated([None] * 5))
    with pytest.raises(PlanError, match=r"'dense' is on device 3 .* which has 2"):
        split_from_annotations(annotated([0, 0, 0, 0, 3]))
    with pytest.raises(PlanError, match="has 2 devices, but there are only 1 names"):
        split_from_annotations(annotated([0] * 5, devices=["a"]))
    sharded = annotated([0] * 5)
    spec = sharded.graph.node[2].device_configurations[0].sharding_spec.add(tensor_name="c2", device=[-1])
    spec.index_to_device_group_map.add(key=-1, value=[0, 1])
    with pytest.raises(PlanError, match="'conv_2' are sharded over the devices 0, 1"):
        split_from_annotations(sharded)


def test_another_models_plan() -> None:
    _, plan = planned(small_model(), split=SPLIT)
    with pytest.raises(PlanError, match="names no layer of this one"):
        write_annotations(calls(), dataclasses.replace(plan))


def test_nodes_that_machines_share_are_not_written() -> None:
    shards = [tvm_split.Shard("conv_1", "relu_1", "rows", {"machine-a": 0.5, "machine-b": 0.5})]
    _, plan = planned(small_model(), shards=shards)
    with pytest.raises(PlanError, match=r"machine-a, machine-b compute stage_0 together, .* save the plan as a file"):
        write_annotations(small_model(), plan)


def test_weights_in_another_file_stay_there(tmp_path: Any) -> None:
    source = tmp_path / "small.onnx"
    onnx.save(small_model(), source, save_as_external_data=True, size_threshold=0, location="weights.bin")
    _, plan = planned(source, split=SPLIT)
    written = write_annotations(read_model(source), plan)
    (tmp_path / "other").mkdir()
    with pytest.raises(PlanError, match="same folder"):
        save_model(written, source, tmp_path / "other" / "small.onnx")
    save_model(written, source, tmp_path / "annotated.onnx")
    onnx.checker.check_model(str(tmp_path / "annotated.onnx"))
    assert tvm_split.load_model(tmp_path / "annotated.onnx").layer_names == sum(map(tuple, SPLIT.values()), ())
    with pytest.raises(PlanError, match="cannot be read"):
        read_model(tmp_path / "weights.bin")
