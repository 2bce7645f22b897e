"""ONNX's multi-device annotations (IR version 11): write a plan into a model, and read a split from it.

A configuration of the model names devices, and each node has a ``pipeline_stage`` per configuration. ONNX does not
define the device of a stage. Here **stage i runs on device i** of the configuration, both counted from 0, and a device
has the name of a machine. A sharding spec with a single device puts a node's tensors on this device instead. It is
written for plans in which a machine has several stages, so that stages and devices do not correspond. If no stage is 0
and the last stage equals the number of devices, stages are read as counted from 1, as in ONNX's own proposal.

See onnx.proto, and docs/proposals/0006-ONNXMultiDeviceProposal.md of the ONNX project.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import onnx

from tvm_split.errors import PlanError
from tvm_split.frontends.onnx.graph import layers_of_nodes
from tvm_split.outputs import written
from tvm_split.placement.plan import Plan

CONFIGURATION = "tvm-split"
IR_VERSION = 11
"""The first IR version with annotations."""


def write_annotations(model: onnx.ModelProto, plan: Plan, configuration: str = CONFIGURATION) -> onnx.ModelProto:
    """Return a copy of ``model`` whose nodes are annotated with their stage of ``plan``.

    The configuration's devices are the machines, in the order of their first stages. It replaces a configuration of the
    same name; others are kept. Nodes that the import folds, mostly arithmetic on shapes, get the stage that needs them.
    The IR version becomes 11 if it was lower.

    Raises:
        PlanError: a node calls a function whose body lies in several stages, a stage is sharded, or the plan is for
            another model.
    """
    shared = next((stage for stage in plan.stages if stage.sharding), None)
    if shared is not None:
        raise PlanError(
            f"{', '.join(shared.machines)} compute {shared.name} together, and annotations are written for nodes that "
            "are whole on one device: save the plan as a file instead (--output), or make one without shards"
        )
    machines = list(dict.fromkeys(stage.machine for stage in plan.stages))
    stages = _stages_of_nodes(model, plan)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = max(copy.ir_version, IR_VERSION)
    other_configurations = [entry for entry in model.configuration if entry.name != configuration]
    del copy.configuration[:]
    copy.configuration.extend(other_configurations)
    copy.configuration.add(name=configuration, num_devices=len(machines), device=machines)
    for node, stage in zip(copy.graph.node, stages, strict=True):
        other_annotations = [entry for entry in node.device_configurations if entry.configuration_id != configuration]
        del node.device_configurations[:]
        node.device_configurations.extend(other_annotations)
        annotation = node.device_configurations.add(configuration_id=configuration, pipeline_stage=stage)
        device = machines.index(plan.stages[stage].machine)
        if len(plan.stages) != len(machines):
            for tensor in node.output:
                if tensor:
                    annotation.sharding_spec.add(tensor_name=tensor, device=[device])
    return copy


def split_from_annotations(
    model: onnx.ModelProto,
    layers: Collection[str] | None = None,
    configuration: str | None = None,
    machines: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Read the layers of each machine from a model's annotations, in the form of the argument ``split=``.

    A node without an annotation gets the device of the node before it; nodes before the first annotated one get its
    device.

    Args:
        model: a model of IR version 11 or later.
        layers: the layers of the imported model; nodes that the import folded are omitted. None keeps all nodes.
        configuration: the name of a configuration; required if the model has several.
        machines: names for the devices, in order, if the configuration does not name them.

    Raises:
        PlanError: no configuration, an unknown one, or several and none chosen; no node is annotated for it; a stage
            has no device; a node's tensors are sharded over several devices.
    """
    chosen = _configuration(model, configuration)
    devices = _device_names(chosen, machines)
    placed = _devices_of_nodes(model, chosen)
    first = next((device for device in placed if device is not None), None)
    if first is None:
        raise PlanError(f"no node of the model is annotated for the device configuration {chosen.name!r}")
    current = devices[first]
    split: dict[str, list[str]] = {}
    for names, device in zip(layers_of_nodes(model), placed, strict=True):
        current = current if device is None else devices[device]
        selected = [name for name in names if layers is None or name in layers]
        if selected:
            split.setdefault(current, []).extend(selected)
    return split


def read_model(path: str | Path) -> onnx.ModelProto:
    """Read a model, without weights that lie in other files.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise PlanError(f"{str(path)!r} cannot be read as an ONNX model: {error}") from error


def save_model(model: onnx.ModelProto, source: str | Path, path: str | Path) -> None:
    """Write a model that was read from ``source`` to ``path``.

    Raises:
        PlanError: weights are in other files, which would not be found from the folder of ``path``.
        OutputError: it cannot be written.
    """
    external = next((t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL), None)
    if external is not None and Path(path).resolve().parent != Path(source).resolve().parent:
        raise PlanError(
            f"weight {external!r} is in a file next to {str(source)!r}; write the annotated model into the same "
            f"folder, {str(Path(source).resolve().parent)!r}"
        )
    with written(path) as beside:
        beside.write_bytes(model.SerializeToString())


def _stages_of_nodes(model: onnx.ModelProto, plan: Plan) -> list[int]:
    """Return the stage of each node; a folded node gets the first stage that needs it, or else the last stage."""
    stage_of_layer = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    nodes = model.graph.node
    stages: list[int | None] = []
    for node, names in zip(nodes, layers_of_nodes(model), strict=True):
        node_stages = sorted({stage_of_layer[name] for name in names if name in stage_of_layer})
        if len(node_stages) > 1:
            raise PlanError(
                f"node {node.name or node.op_type!r} calls a function whose layers lie in "
                f"{' and '.join(plan.stages[stage].name for stage in node_stages)}, and a node has one stage only: "
                "inline the functions first (onnx.inliner.inline_local_functions)"
            )
        stages.append(node_stages[0] if node_stages else None)
    if all(stage is None for stage in stages):
        raise PlanError(f"the plan is for model {plan.model!r}: it names no layer of this one")
    # Backwards, so that a chain of folded nodes starts from a node that has a stage.
    needed_in: dict[str, int] = {}
    for position in range(len(nodes) - 1, -1, -1):
        stage = stages[position]
        if stage is None:
            users = [needed_in[tensor] for tensor in nodes[position].output if tensor in needed_in]
            stage = stages[position] = min(users, default=len(plan.stages) - 1)
        for tensor in nodes[position].input:
            needed_in[tensor] = min(stage, needed_in.get(tensor, stage))
    return [stage for stage in stages if stage is not None]


def _configuration(model: onnx.ModelProto, configuration: str | None) -> onnx.DeviceConfigurationProto:
    by_name = {entry.name: entry for entry in model.configuration}
    listing = ", ".join(map(repr, by_name))
    if not by_name:
        raise PlanError(
            "the model has no device configuration, so it says nothing of a split; "
            "`tvm-split plan MODEL --write-annotations FILE` writes one"
        )
    if configuration is None and len(by_name) > 1:
        raise PlanError(f"the model has {len(by_name)} device configurations: {listing}; name the one to use")
    chosen = by_name.get(configuration or next(iter(by_name)))
    if chosen is None:
        raise PlanError(f"the model has no device configuration {configuration!r}; it has {listing}")
    return chosen


def _device_names(chosen: onnx.DeviceConfigurationProto, machines: Sequence[str]) -> list[str]:
    names = list(chosen.device) or list(machines)
    if len(names) < chosen.num_devices:
        raise PlanError(
            f"the device configuration {chosen.name!r} has {chosen.num_devices} devices, but there are only "
            f"{len(names)} names ({', '.join(names)}); give a machine for each device"
        )
    return names


def _devices_of_nodes(model: onnx.ModelProto, chosen: onnx.DeviceConfigurationProto) -> list[int | None]:
    by_node = [{entry.configuration_id: entry for entry in node.device_configurations} for node in model.graph.node]
    annotations = [entries.get(chosen.name) for entries in by_node]
    numbered = {
        annotation.pipeline_stage
        for annotation in annotations
        if annotation is not None and annotation.HasField("pipeline_stage")
    }
    start = 1 if numbered and min(numbered) == 1 and max(numbered) == chosen.num_devices else 0
    devices: list[int | None] = []
    for node, annotation in zip(model.graph.node, annotations, strict=True):
        device = None if annotation is None else _device(node, annotation, start)
        if device is not None and not 0 <= device < chosen.num_devices:
            raise PlanError(
                f"node {node.name or node.op_type!r} is on device {device} of the device configuration "
                f"{chosen.name!r}, which has {chosen.num_devices}, counted from 0"
            )
        devices.append(device)
    return devices


def _device(node: onnx.NodeProto, annotation: onnx.NodeDeviceConfigurationProto, start: int) -> int | None:
    explicit: set[int] = set()
    for spec in annotation.sharding_spec:
        members = {entry.key: entry.value for entry in spec.index_to_device_group_map}
        for device in spec.device:
            explicit.update(members.get(device, [device]))
    if len(explicit) > 1:
        raise PlanError(
            f"the tensors of node {node.name or node.op_type!r} are sharded over the devices "
            f"{', '.join(map(str, sorted(explicit)))}; only nodes that are whole on one device can be read"
        )
    if explicit:
        return explicit.pop()
    return annotation.pipeline_stage - start if annotation.HasField("pipeline_stage") else None
