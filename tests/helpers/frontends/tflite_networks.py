"""A network in a TFLite file as TensorFlow's converter writes it."""

from typing import Any

import numpy as np

from tests.helpers.frontends.tflite_files import Writer

SAME = {"padding": 0, "strideW": 1, "strideH": 1}
OUTPUT = "StatefulPartitionedCall_1:0"


def network(kind: str = "float32") -> bytes:
    """Named as Keras's export of a network ``net``; its weights in ``kind``, int8 also what is computed."""
    generator = np.random.default_rng(0)
    writer = Writer()
    steps: dict[str, Any] = {"scale": 0.05, "zero_point": 2} if kind == "int8" else {}

    def weight(*shape: int, name: str) -> int:
        values = 0.3 * generator.standard_normal(shape).astype("float32")
        scales = 0.02 + 0.001 * np.arange(shape[0])
        if kind == "int8" and len(shape) == 1:
            scales *= steps["scale"]  # as the format says: that of the weights times that of the input
            return writer.constant(np.round(values / scales).astype("int32"), name, scale=scales)
        if kind == "int8":
            rounded = np.round(values / scales.reshape(-1, *[1] * (len(shape) - 1)))
            return writer.constant(rounded.astype("int8"), name, scale=scales, zero_point=np.zeros(shape[0]), axis=0)
        if kind == "float16":
            return writer.add("DEQUANTIZE", [writer.constant(values.astype("float16"), name)], name=f"{name}1")
        return writer.constant(values, name)

    def add(operator: str, inputs: list[int], table: str, options: dict[str, Any], name: str) -> int:
        return writer.add(operator, inputs, table, options, dtype="int8" if steps else "float32", name=name, **steps)

    image = writer.input([-1, 8, 8, 3], "int8" if steps else "float32", "serving_default_image:0", **steps)
    stem = [weight(4, 3, 3, 3, name="net_1/stem_1/convolution"), weight(4, name="net_1/act_1/Relu;net_1/norm_1/sub")]
    name = "net_1/act_1/Relu;net_1/norm_1/batchnorm/add_1;net_1/stem_1/BiasAdd;net_1/stem_1/convolution"
    x = add("CONV_2D", [image, *stem], "Conv2D", {**SAME, "fusedActivationFunction": 1}, name)
    block = [weight(4, 3, 3, 4, name="arith.constant1"), weight(4, name="arith.constant")]
    # The converter shares equal constants, so that a second call is called after the first one, too.
    first = add("CONV_2D", [x, *block], "Conv2D", SAME, "net_1/block_1/conv_1/BiasAdd;net_1/block_1/conv_1/convolution")
    x = add("ADD", [first, x], "Add", {}, "net_1/skip_1/Add")
    name = "net_1/block_3/conv_1/BiasAdd;net_1/block_3/conv_1/convolution;net_1/block_1/conv_1/Squeeze"
    x = add("CONV_2D", [x, *block], "Conv2D", SAME, name)
    axes = writer.constant(np.array([1, 2], "int32"), "net_1/pool_1/Mean/reduction_indices")
    x = add("MEAN", [x, axes], "Reducer", {"keepDims": False}, "net_1/pool_1/Mean")
    head = [weight(5, 4, name="net_1/head_1/MatMul"), weight(5, name="net_1/head_1/BiasAdd")]
    return writer.file(add("FULLY_CONNECTED", [x, *head], "FullyConnected", {}, OUTPUT))
