"""The ``light_*`` networks that the onnx package ships, with weights worth computing with.

Theirs are all 0.02, made by ``ConstantOfShape`` nodes; with such weights every channel is equal, and a wrong order of
channels goes unnoticed. Here each gets seeded random values, scaled so that activations keep their size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

LIGHT_MODELS = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
# What each input of an operator is, where that decides its scale.
_ROLES = {
    "Conv": {1: "kernel", 2: "bias"},
    "Gemm": {1: "matrix", 2: "bias"},
    "BatchNormalization": {1: "scale", 2: "bias", 3: "bias", 4: "variance"},
}


def light_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """``light_resnet50`` and the like, with the weights as initializers; the softmax at the end is left away.

    Behind the softmax of a thousand classes all values are near 0.001, and a difference in the logits hardly shows.
    """
    model = onnx.load(LIGHT_MODELS / f"{name}.onnx")
    graph = model.graph
    generator = np.random.default_rng(seed)
    shapes = {each.name: tuple(numpy_helper.to_array(each)) for each in graph.initializer}
    constants = {node.output[0]: shapes[node.input[0]] for node in graph.node if node.op_type == "ConstantOfShape"}
    kept = [node for node in graph.node if node.op_type not in ("ConstantOfShape", "Softmax")]
    result = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Softmax"}
    weights = {}
    for node in kept:
        for position, tensor in enumerate(node.input):
            if tensor in constants and tensor not in weights:
                role = _ROLES.get(node.op_type, {}).get(position, "bias")
                weights[tensor] = _values(role, constants[tensor], generator, last=_is_last_of_branch(node, kept))
    used = {tensor for node in kept for tensor in node.input}
    initializers = [each for each in graph.initializer if each.name in used]
    initializers += [numpy_helper.from_array(values, tensor) for tensor, values in weights.items()]
    inputs = [each for each in graph.input if each.name not in shapes and each.name not in constants]
    ends = [result.get(each.name, each.name) for each in graph.output]
    outputs = [helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, None) for each in ends]
    made = helper.make_model(
        helper.make_graph(kept, name, inputs, outputs, initializers),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    return onnx.shape_inference.infer_shapes(made)


def _values(role: str, shape: tuple[int, ...], generator: np.random.Generator, last: bool) -> np.ndarray:
    if role in ("kernel", "matrix"):
        fan_in = np.prod(shape[1:])
        return (generator.standard_normal(shape) * np.sqrt(2.0 / fan_in)).astype(np.float32)
    if role in ("scale", "variance"):
        # The last norm of a residual branch is small, or the activations grow with every block.
        return (generator.uniform(0.8, 1.2, shape) * (0.3 if last and role == "scale" else 1.0)).astype(np.float32)
    return (generator.standard_normal(shape) * 0.05).astype(np.float32)


def _is_last_of_branch(node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> bool:
    return any(other.op_type == "Sum" and node.output[0] in other.input for other in nodes)
