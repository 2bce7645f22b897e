"""A network of two convolutions and a fully connected layer, whose nodes have names."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INPUT_SHAPE = (2, 3, 6, 6)

OUTPUT_SHAPE = (2, 5)


def small_model() -> onnx.ModelProto:
    generator = np.random.default_rng(0)

    def weight(name, *shape):
        return numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32) / 4, name)

    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], name="conv_1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu_1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv_2", pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["c2"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["scores"], name="dense", transB=1),
    ]
    weights = [
        weight("w1", 8, 3, 3, 3),
        weight("b1", 8),
        weight("w2", 2, 8, 3, 3),
        weight("w3", 5, 72),
        weight("b3", 5),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, INPUT_SHAPE)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, OUTPUT_SHAPE)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model
