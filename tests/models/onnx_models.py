"""The ``light_*`` networks that the onnx package ships, with weights worth computing with.

Theirs are all 0.02, made by ``ConstantOfShape`` nodes; with such weights every channel is equal, and a wrong order of
channels goes unnoticed. Here each gets seeded random values, scaled so that activations keep their size.
"""

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
    shapes = {initializer.name: tuple(numpy_helper.to_array(initializer)) for initializer in graph.initializer}
    constants = {node.output[0]: shapes[node.input[0]] for node in graph.node if node.op_type == "ConstantOfShape"}
    nodes = [node for node in graph.node if node.op_type not in ("ConstantOfShape", "Softmax")]
    result = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Softmax"}
    weights = {}
    for node in nodes:
        for position, tensor in enumerate(node.input):
            if tensor in constants and tensor not in weights:
                role = _ROLES.get(node.op_type, {}).get(position, "bias")
                weights[tensor] = _values(role, constants[tensor], generator, last=_is_last_of_branch(node, nodes))
    used = {tensor for node in nodes for tensor in node.input}
    initializers = [initializer for initializer in graph.initializer if initializer.name in used]
    initializers += [numpy_helper.from_array(values, tensor) for tensor, values in weights.items()]
    inputs = [value for value in graph.input if value.name not in shapes and value.name not in constants]
    ends = [result.get(value.name, value.name) for value in graph.output]
    outputs = [helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, None) for end in ends]
    light = helper.make_model(
        helper.make_graph(nodes, name, inputs, outputs, initializers),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    return onnx.shape_inference.infer_shapes(light)


def _values(role: str, shape: tuple[int, ...], generator: np.random.Generator, last: bool) -> np.ndarray:
    if role in ("kernel", "matrix"):
        fan_in = np.prod(shape[1:])
        return (generator.standard_normal(shape) * np.sqrt(2.0 / fan_in)).astype(np.float32)
    if role in ("scale", "variance"):
        # The last norm of a residual branch is small, or the activations grow with every block.
        return (generator.uniform(0.8, 1.2, shape) * (0.3 if last and role == "scale" else 1.0)).astype(np.float32)
    return (generator.standard_normal(shape) * 0.05).astype(np.float32)


def _is_last_of_branch(node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> bool:
    return any(consumer.op_type == "Sum" and node.output[0] in consumer.input for consumer in nodes)
