"""ONNX nodes written in the form that TVM's importer gets right, before it sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import defs, helper

from tvm_split.errors import ModelImportError, last_line

_FUNCTIONS = "tvm_split.functions"
"""The domain that functions get which depend on the node that calls them."""

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...] | None


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def with_functions_inlined(
    nodes: Iterable[onnx.NodeProto], importable: frozenset[str], types: Mapping[str, onnx.ValueInfoProto], opset: int
) -> list[onnx.NodeProto]:
    """Replace operators that TVM does not import by the simpler ones that ONNX itself defines them by.

    The new nodes keep the name of the old one. ``types`` has the type of every tensor that is known.
    """
    result: list[onnx.NodeProto] = []
    for node in nodes:
        is_own = node.domain in ("", "ai.onnx")
        if is_own and node.op_type not in importable and _has_function(node.op_type, opset):
            result.extend(_function_body(node, types, opset))
        else:
            result.append(node)
    return result


def _function_body(
    node: onnx.NodeProto, types: Mapping[str, onnx.ValueInfoProto], opset: int
) -> Iterable[onnx.NodeProto]:
    try:
        inlined = _inlined(node, types, opset)
    except Exception as error:
        reason = last_line(error)
        raise ModelImportError(
            f"operator {node.op_type} of node {node.name!r} cannot be replaced by the simpler ones "
            f"that ONNX defines it by: {reason}"
        ) from error
    outside = {*node.input, *node.output}
    for part in inlined.graph.node:
        part.name = node.name
        for names in (part.input, part.output):
            for position, name in enumerate(names):
                if name and name not in outside:
                    names[position] = f"{node.output[0]}:{name}"
        yield part


def _inlined(node: onnx.NodeProto, types: Mapping[str, onnx.ValueInfoProto], opset: int) -> onnx.ModelProto:
    inputs = [types.get(name, onnx.ValueInfoProto(name=name)) for name in dict.fromkeys(node.input) if name]
    outputs = [types.get(name, onnx.ValueInfoProto(name=name)) for name in node.output if name]
    schema = defs.get_schema(node.op_type, opset)
    imports = [helper.make_opsetid("", opset)]
    if not schema.has_context_dependent_function:
        graph = helper.make_graph([node], "function", inputs, outputs)
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        return onnx.inliner.inline_selected_functions(model, [("", node.op_type)], inline_schema_functions=True)
    # ONNX's inliner asks for the type of inputs that are left out, too, and fails.
    kinds = [types[name].type.SerializeToString() if name in types else b"" for name in node.input]
    function = onnx.FunctionProto.FromString(schema.get_context_dependent_function(node.SerializeToString(), kinds))
    function.domain = _FUNCTIONS
    del function.opset_import[:]
    function.opset_import.extend(imports)
    call = onnx.NodeProto()
    call.CopyFrom(node)
    call.domain = _FUNCTIONS
    graph = helper.make_graph([call], "function", inputs, outputs)
    model = helper.make_model(
        graph, opset_imports=[*imports, helper.make_opsetid(_FUNCTIONS, 1)], functions=[function], ir_version=10
    )
    return onnx.inliner.inline_local_functions(model)


def _has_function(operator: str, opset: int) -> bool:
    try:
        schema = defs.get_schema(operator, opset)
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def rewritten(
    node: onnx.NodeProto, shapes: Mapping[str, Shape], constants: dict[str, Array], opset: int
) -> onnx.NodeProto:
    """``node`` or its replacement; new constants go into ``constants``.

    - ``auto_pad`` and ``output_shape`` become ``pads``: TVM pads in a kernel of its own, and SAME_LOWER wrongly.
    - The attributes of Slice before opset 10 become inputs.
    """
    attributes = attributes_of(node)
    if (
        node.op_type in ("Conv", "MaxPool", "AveragePool", "LpPool")
        and attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    ):
        return _with_pads(node, attributes, shapes)
    if node.op_type == "ConvTranspose" and (
        "output_shape" in attributes or attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    ):
        return _transpose_with_pads(node, attributes, shapes)
    if node.op_type == "Resize":
        _check_resize(node, attributes)
    if node.op_type == "Slice" and opset < 10:
        return _slice_with_inputs(node, attributes, constants)
    return node


def _replaced(node: onnx.NodeProto, removed: set[str], **added: Any) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    kept = [attribute for attribute in node.attribute if attribute.name not in removed and attribute.name not in added]
    del copy.attribute[:]
    copy.attribute.extend(kept)
    copy.attribute.extend(helper.make_attribute(name, value) for name, value in added.items())
    return copy


def _kernel(node: onnx.NodeProto, attributes: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[int]:
    if "kernel_shape" in attributes:
        return list(attributes["kernel_shape"])
    weight = shapes.get(node.input[1])
    if weight is None:
        raise ModelImportError(f"node {node.name!r} ({node.op_type}) has a kernel of unknown size")
    return list(weight[2:])


def _sizes(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> list[int]:
    shape = shapes.get(node.input[0])
    if shape is None:
        raise ModelImportError(f"node {node.name!r} ({node.op_type}) has an input of unknown shape")
    return list(shape[2:])


def _with_pads(node: onnx.NodeProto, attributes: Mapping[str, Any], shapes: Mapping[str, Shape]) -> onnx.NodeProto:
    kernel, sizes = _kernel(node, attributes, shapes), _sizes(node, shapes)
    strides = attributes.get("strides", [1] * len(kernel))
    dilations = attributes.get("dilations", [1] * len(kernel))
    mode = attributes["auto_pad"]
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + dilation * (width - 1) + 1 - size)
        smaller, larger = total // 2, total - total // 2
        if mode == b"VALID":
            smaller = larger = 0
        before.append(smaller if mode == b"SAME_UPPER" else larger)
        after.append(larger if mode == b"SAME_UPPER" else smaller)
    return _replaced(node, {"auto_pad"}, pads=before + after)


def _transpose_with_pads(
    node: onnx.NodeProto, attributes: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> onnx.NodeProto:
    kernel, sizes = _kernel(node, attributes, shapes), _sizes(node, shapes)
    strides = attributes.get("strides", [1] * len(kernel))
    dilations = attributes.get("dilations", [1] * len(kernel))
    extra = list(attributes.get("output_padding", [0] * len(kernel)))
    mode = attributes.get("auto_pad", b"NOTSET")
    before, after = [], []
    wanted = attributes.get("output_shape")
    for axis, (size, width, stride, dilation) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
        full = stride * (size - 1) + extra[axis] + dilation * (width - 1) + 1
        target = full if mode == b"VALID" else size * stride if wanted is None else int(wanted[axis - len(kernel)])
        total = full - target
        if total < 0:
            extra[axis] -= total
            total = 0
        smaller, larger = total // 2, total - total // 2
        before.append(larger if mode != b"SAME_UPPER" else smaller)
        after.append(smaller if mode != b"SAME_UPPER" else larger)
    return _replaced(node, {"auto_pad", "output_shape"}, pads=before + after, output_padding=extra)


def _check_resize(node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """TVM's importer ignores these attributes."""
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    refused = [name for name in ("antialias", "exclude_outside", "axes") if attributes.get(name)]
    if refused or policy != b"stretch":
        shown = ", ".join(refused) or f"keep_aspect_ratio_policy={policy.decode()!r}"
        raise ModelImportError(f"operator Resize of node {node.name!r} cannot be imported: it uses {shown}")


def _slice_with_inputs(
    node: onnx.NodeProto, attributes: Mapping[str, Any], constants: dict[str, Array]
) -> onnx.NodeProto:
    copy = _replaced(node, {"starts", "ends", "axes"})
    starts = list(attributes["starts"])
    values = (("starts", starts), ("ends", attributes["ends"]), ("axes", attributes.get("axes", range(len(starts)))))
    for what, numbers in values:
        name = f"{node.output[0]}:{what}"
        constants[name] = np.array(list(numbers), dtype=np.int64)
        copy.input.append(name)
    return copy
