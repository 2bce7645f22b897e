# ruff: noqa: E501
# fmt: off
"""The table of the TFLite sweep: small files for each operator and each way of using it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.frontends.tflite_files import Writer

SAME, VALID = 0, 1
RELU, RELU_N1_TO_1, RELU6, TANH = 1, 2, 3, 4
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A file, inputs for it, and how many steps of its quantised outputs it may be from LiteRT's answer."""

    name: str
    content: bytes
    inputs: tuple[Array, ...]
    steps: int = 0
    tolerance: float | None = None


CASES: list[Case] = []


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype("float32")


def integers(*values: Any) -> Array:
    return np.array(values, "int32")


def case(name: str, kind: str, inputs: Sequence[Array], constants: Sequence[Array | None] = (), table: str = "", options: Mapping[str, Any] | None = None, dtype: str = "", before: bool = False, outputs: int = 1, tolerance: float | None = None) -> None:
    """One operator, its ``inputs`` first, or the ``constants`` (None: left out)."""
    writer = Writer()
    tensors = [writer.input(array.shape, str(array.dtype)) for array in inputs]
    fixed = [-1 if array is None else writer.constant(array) for array in constants]
    results = [writer.tensor((), dtype or str(inputs[0].dtype)) for _ in range(outputs)]
    writer.add_several(kind, [*fixed, *tensors] if before else [*tensors, *fixed], results, table, options)
    CASES.append(Case(name, writer.file(*results), tuple(inputs), tolerance=tolerance))


x, y, row = random(2, 3, 5, 4), random(2, 3, 5, 4, seed=1), random(4)
for unary in ("ABS", "CEIL", "COS", "EXP", "FLOOR", "NEG", "ROUND", "SIN", "SQUARE", "TANH", "LOGISTIC", "RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "HARD_SWISH", "ELU", "LOG_SOFTMAX", "SIGN", "ZEROS_LIKE"):
    case(unary.lower(), unary, [x])
for unary in ("LOG", "SQRT", "RSQRT"):
    case(unary.lower(), unary, [np.abs(x) + 0.5])
case("round_halves", "ROUND", [np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])])
case("leaky_relu", "LEAKY_RELU", [x], [], "LeakyRelu", {"alpha": 0.3})
case("gelu", "GELU", [x], [], "Gelu", {"approximate": False})
case("gelu_tanh", "GELU", [x], [], "Gelu", {"approximate": True})
case("softmax", "SOFTMAX", [x], [], "Softmax", {"beta": 1.0})
case("softmax_beta", "SOFTMAX", [x], [], "Softmax", {"beta": 2.5})
case("l2_normalization", "L2_NORMALIZATION", [x], [], "L2Norm", {})
case("prelu", "PRELU", [x], [random(1, 1, 4)])
case("local_response", "LOCAL_RESPONSE_NORMALIZATION", [random(1, 4, 4, 8)], [], "LocalResponseNormalization", {"radius": 2, "bias": 1.0, "alpha": 0.5, "beta": 0.75})
for binary, table in (("ADD", "Add"), ("SUB", "Sub"), ("MUL", "Mul"), ("DIV", "Div"), ("MAXIMUM", "MaximumMinimum"), ("MINIMUM", "MaximumMinimum"), ("SQUARED_DIFFERENCE", "SquaredDifference"), ("FLOOR_MOD", "FloorMod"), ("FLOOR_DIV", "FloorDiv")):
    case(binary.lower(), binary, [x, y], [], table)
    case(f"{binary.lower()}_row", binary, [x], [row], table)
    case(f"{binary.lower()}_scalar", binary, [x], [np.array(1.5, "float32")], table)
case("pow", "POW", [np.abs(x) + 0.1, y], [], "Pow")
case("rank_differs", "ADD", [x, random(5, 4)], [], "Add")
for binary in ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"):
    case(binary.lower(), binary, [np.round(x), np.round(y)], dtype="bool")
for binary, table in (("ADD", "Add"), ("SUB", "Sub"), ("MUL", "Mul")):
    for name, activation in (("relu", RELU), ("relu_n1_to_1", RELU_N1_TO_1), ("relu6", RELU6)):
        case(f"{binary.lower()}_{name}", binary, [x, y], [], table, {"fusedActivationFunction": activation})
case("logical_and", "LOGICAL_AND", [x > 0, y > 0], [], "LogicalAnd")
case("logical_or", "LOGICAL_OR", [x > 0, y > 0], [], "LogicalOr")
case("logical_not", "LOGICAL_NOT", [x > 0], [], "LogicalNot")
case("add_int32", "ADD", [integers(1, 2, 3)], [integers(4, 5, 6)], "Add")
case("floor_div_int32", "FLOOR_DIV", [integers(-7, 7, 5)], [integers(2, -2, 2)], "FloorDiv")
case("floor_mod_int32", "FLOOR_MOD", [integers(-7, 7, 5)], [integers(2, -2, 2)], "FloorMod")
case("add_n", "ADD_N", [x, y, x], [], "AddN")
case("select_v2", "SELECT_V2", [x > 0, x, y], [], "SelectV2", dtype="float32")
case("cast", "CAST", [x * 3], [], "Cast", {}, dtype="int32")
case("cast_back", "CAST", [integers(1, -2)], [], "Cast", {}, dtype="float32")
for reduce in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"):
    case(reduce.lower(), reduce, [x], [integers(1, 2)], "Reducer", {"keepDims": False})
    case(f"{reduce.lower()}_kept", reduce, [x], [integers(-1)], "Reducer", {"keepDims": True})
for reduce in ("REDUCE_ANY", "REDUCE_ALL"):
    case(reduce.lower(), reduce, [x > 0], [integers(1)], "Reducer", {"keepDims": False})
case("arg_max", "ARG_MAX", [x], [integers(-1)[0]], "ArgMax", {"outputType": 2}, dtype="int32")
case("arg_min", "ARG_MIN", [x], [integers(1)[0]], "ArgMin", {"outputType": 4}, dtype="int64")
case("cumsum", "CUMSUM", [x], [integers(1)[0]], "Cumsum", {"exclusive": False, "reverse": False})
case("cumsum_exclusive", "CUMSUM", [x], [integers(1)[0]], "Cumsum", {"exclusive": True, "reverse": True})
case("reshape", "RESHAPE", [x], [integers(2, -1)], "Reshape", {"newShape": [2, -1]})
case("squeeze", "SQUEEZE", [random(2, 1, 3, 1)], [], "Squeeze", {"squeezeDims": [1]})
case("squeeze_all", "SQUEEZE", [random(2, 1, 3, 1)], [], "Squeeze", {"squeezeDims": []})
case("expand_dims", "EXPAND_DIMS", [x], [integers(-1)[0]], "ExpandDims")
case("transpose", "TRANSPOSE", [x], [integers(0, 3, 1, 2)], "Transpose")
case("pad", "PAD", [x], [np.array([[0, 0], [1, 2], [3, 0], [0, 1]], "int32")], "Pad")
case("padv2", "PADV2", [x], [np.array([[0, 0], [1, 2], [3, 0], [0, 1]], "int32"), np.float32([2.5])], "PadV2")
case("mirror_pad", "MIRROR_PAD", [x], [np.array([[0, 0], [1, 2], [2, 0], [0, 1]], "int32")], "MirrorPad", {"mode": 0})
case("mirror_pad_symmetric", "MIRROR_PAD", [x], [np.array([[0, 0], [1, 2], [2, 0], [0, 1]], "int32")], "MirrorPad", {"mode": 1})
case("concatenation", "CONCATENATION", [x, y], [], "Concatenation", {"axis": -1})
case("concatenation_relu", "CONCATENATION", [x, y], [], "Concatenation", {"axis": 1, "fusedActivationFunction": 0})
case("split", "SPLIT", [x], [integers(3)[0]], "Split", {"numSplits": 2}, before=True, outputs=2)
case("split_v", "SPLIT_V", [x], [integers(1, 3), integers(3)[0]], "SplitV", {"numSplits": 2}, outputs=2)
case("slice", "SLICE", [x], [integers(0, 1, 2, 0), integers(2, 1, -1, 3)], "Slice")
case("strided_slice", "STRIDED_SLICE", [x], [integers(0, 0, 4, 0), integers(2, 3, 0, 4), integers(1, 2, -2, 1)], "StridedSlice", {})
case("strided_slice_masks", "STRIDED_SLICE", [x], [integers(0, 1, 1, 0), integers(0, 2, 3, 0), integers(1, 1, 1, 1)], "StridedSlice", {"beginMask": 9, "endMask": 9, "shrinkAxisMask": 2})
case("pack", "PACK", [x, y], [], "Pack", {"valuesCount": 2, "axis": 1})
case("unpack", "UNPACK", [x], [], "Unpack", {"num": 3, "axis": 1}, outputs=3)
case("tile", "TILE", [x], [integers(1, 2, 1, 3)], "Tile")
case("gather", "GATHER", [x], [integers(2, 0)], "Gather", {"axis": 1})
case("gather_of_inputs", "GATHER", [x, integers(2, 0)], [], "Gather", {"axis": 1})
case("gather_nd", "GATHER_ND", [x], [np.array([[1, 2], [0, 0]], "int32")], "GatherNd")
case("broadcast_to", "BROADCAST_TO", [random(3, 1)], [integers(2, 3, 4)], "BroadcastTo")
case("reverse_v2", "REVERSE_V2", [x], [integers(2)], "ReverseV2")
case("space_to_depth", "SPACE_TO_DEPTH", [random(1, 4, 6, 3)], [], "SpaceToDepth", {"blockSize": 2})
case("depth_to_space", "DEPTH_TO_SPACE", [random(1, 2, 3, 12)], [], "DepthToSpace", {"blockSize": 2})
case("space_to_batch", "SPACE_TO_BATCH_ND", [random(1, 4, 5, 3)], [integers(2, 2), np.array([[0, 0], [1, 0]], "int32")], "SpaceToBatchND")
case("batch_to_space", "BATCH_TO_SPACE_ND", [random(4, 2, 3, 3)], [integers(2, 2), np.array([[0, 0], [1, 0]], "int32")], "BatchToSpaceND")
case("one_hot", "ONE_HOT", [integers(1, 0, 3)], [integers(4)[0], np.array(2, "float32"), np.array(-1, "float32")], "OneHot", {"axis": -1}, dtype="float32")
case("embedding_lookup", "EMBEDDING_LOOKUP", [integers(1, 0, 3)], [random(5, 4)], dtype="float32")
case("resize_nearest", "RESIZE_NEAREST_NEIGHBOR", [x], [integers(6, 7)], "ResizeNearestNeighbor", {})
case("resize_nearest_half", "RESIZE_NEAREST_NEIGHBOR", [x], [integers(6, 7)], "ResizeNearestNeighbor", {"halfPixelCenters": True})
case("resize_bilinear", "RESIZE_BILINEAR", [x], [integers(6, 7)], "ResizeBilinear", {})
case("resize_bilinear_half", "RESIZE_BILINEAR", [x], [integers(6, 7)], "ResizeBilinear", {"halfPixelCenters": True})
case("resize_bilinear_corners", "RESIZE_BILINEAR", [x], [integers(6, 7)], "ResizeBilinear", {"alignCorners": True})
case("batch_matmul", "BATCH_MATMUL", [random(2, 3, 4), random(2, 4, 5)], [], "BatchMatMul", {})
case("batch_matmul_turned", "BATCH_MATMUL", [random(2, 4, 3), random(2, 5, 4)], [], "BatchMatMul", {"adjX": True, "adjY": True})
case("fully_connected", "FULLY_CONNECTED", [random(3, 8)], [random(5, 8), random(5)], "FullyConnected", {"fusedActivationFunction": RELU})
case("fully_connected_kept", "FULLY_CONNECTED", [random(2, 3, 8)], [random(5, 8), None], "FullyConnected", {"keepNumDims": True})
case("fully_connected_flat", "FULLY_CONNECTED", [random(2, 3, 8)], [random(5, 8), random(5)], "FullyConnected", {})
case("fully_connected_of_image", "FULLY_CONNECTED", [random(2, 2, 2, 2)], [random(5, 8), random(5)], "FullyConnected", {})
image = random(2, 9, 7, 4)
for name, padding in (("same", SAME), ("valid", VALID)):
    for stride in (1, 2):
        steps = {"padding": padding, "strideW": stride, "strideH": stride}
        case(f"conv_{name}_{stride}", "CONV_2D", [image], [random(6, 3, 3, 4), random(6)], "Conv2D", {**steps, "fusedActivationFunction": RELU6})
        case(f"depthwise_{name}_{stride}", "DEPTHWISE_CONV_2D", [image], [random(1, 3, 3, 4), random(4)], "DepthwiseConv2D", {**steps, "depthMultiplier": 1, "fusedActivationFunction": RELU})
        case(f"max_pool_{name}_{stride}", "MAX_POOL_2D", [image], [], "Pool2D", {**steps, "filterWidth": 3, "filterHeight": 2})
        case(f"average_pool_{name}_{stride}", "AVERAGE_POOL_2D", [image], [], "Pool2D", {**steps, "filterWidth": 3, "filterHeight": 2, "fusedActivationFunction": RELU})
        case(f"transposed_{name}_{stride}", "TRANSPOSE_CONV", [image], [integers(2, 9 * stride + (stride == 1 or padding) * (2 * (padding == VALID)) - (stride == 2 and padding == VALID), 7 * stride + (stride == 1 or padding) * (2 * (padding == VALID)) - (stride == 2 and padding == VALID), 6), random(6, 3, 3, 4)], "TransposeConv", steps, before=True)
case("conv_dilated", "CONV_2D", [image], [random(6, 3, 3, 4), random(6)], "Conv2D", {"padding": SAME, "strideW": 1, "strideH": 1, "dilationWFactor": 2, "dilationHFactor": 3})
case("conv_grouped", "CONV_2D", [image], [random(6, 3, 3, 2), random(6)], "Conv2D", {"padding": SAME, "strideW": 1, "strideH": 1})
case("conv_tanh", "CONV_2D", [image], [random(6, 1, 1, 4), random(6)], "Conv2D", {"padding": SAME, "strideW": 1, "strideH": 1})
case("depthwise_multiplied", "DEPTHWISE_CONV_2D", [image], [random(1, 3, 3, 8), random(8)], "DepthwiseConv2D", {"padding": SAME, "strideW": 1, "strideH": 1, "depthMultiplier": 2})
case("depthwise_dilated", "DEPTHWISE_CONV_2D", [image], [random(1, 3, 3, 4), random(4)], "DepthwiseConv2D", {"padding": SAME, "strideW": 1, "strideH": 1, "depthMultiplier": 1, "dilationWFactor": 2, "dilationHFactor": 2})
case("depthwise_of_one_channel", "DEPTHWISE_CONV_2D", [random(1, 6, 6, 1)], [random(1, 3, 3, 5), random(5)], "DepthwiseConv2D", {"padding": SAME, "strideW": 1, "strideH": 1, "depthMultiplier": 5})


def quantized(name: str, kind: str, inputs: Sequence[Array], constants: Sequence[tuple[Array, float] | Array] = (), table: str = "", options: Mapping[str, Any] | None = None, scale: float = 0.05, zero_point: int = 3, steps: int = 1, output: tuple[float, int] | None = None) -> None:
    """One operator on int8, whose inputs are ``inputs`` in steps of ``scale``; constants with a step are quantised."""
    writer = Writer()
    numbers = [np.clip(np.round(array / scale) + zero_point, -128, 127).astype("int8") for array in inputs]
    tensors = [writer.input(array.shape, "int8", scale=scale, zero_point=zero_point) for array in inputs]
    for operand in constants:
        if isinstance(operand, tuple):
            array, step = operand
            tensors.append(writer.constant(np.round(array / step).astype("int32" if array.ndim == 1 else "int8"), scale=step))
        else:
            tensors.append(writer.constant(operand))
    result = {"scale": (output or (scale, zero_point))[0], "zero_point": (output or (scale, zero_point))[1]}
    result_tensor = writer.add(kind, tensors, table, options, dtype="int8", **result)
    CASES.append(Case(f"int8_{name}", writer.file(result_tensor), tuple(numbers), steps))


for binary, table in (("ADD", "Add"), ("SUB", "Sub"), ("MUL", "Mul")):
    quantized(binary.lower(), binary, [x, y], [], table, output=(0.1, -4))
quantized("add_relu", "ADD", [x, y], [], "Add", {"fusedActivationFunction": RELU6}, output=(0.1, -4))
quantized("mean", "MEAN", [x], [integers(1, 2)], "Reducer", {"keepDims": True})
quantized("sum", "SUM", [x], [integers(1)], "Reducer", {"keepDims": True}, output=(0.1, 0))
quantized("max", "REDUCE_MAX", [x], [integers(1)], "Reducer", {"keepDims": True})
quantized("logistic", "LOGISTIC", [x], output=(1 / 256, -128))
quantized("tanh", "TANH", [x], output=(1 / 128, 0))
quantized("softmax", "SOFTMAX", [x], [], "Softmax", {"beta": 1.0}, output=(1 / 256, -128))
quantized("hard_swish", "HARD_SWISH", [x])
quantized("leaky_relu", "LEAKY_RELU", [x], [], "LeakyRelu", {"alpha": 0.3})
quantized("relu6", "RELU6", [x * 3])
quantized("max_pool", "MAX_POOL_2D", [image], [], "Pool2D", {"padding": SAME, "strideW": 2, "strideH": 2, "filterWidth": 3, "filterHeight": 3})
quantized("average_pool", "AVERAGE_POOL_2D", [image], [], "Pool2D", {"padding": SAME, "strideW": 2, "strideH": 2, "filterWidth": 3, "filterHeight": 3})
quantized("concatenation", "CONCATENATION", [x, y], [], "Concatenation", {"axis": -1})
quantized("pad", "PAD", [x], [np.array([[0, 0], [1, 2], [3, 0], [0, 1]], "int32")], "Pad", steps=0)
quantized("transpose", "TRANSPOSE", [x], [integers(0, 3, 1, 2)], "Transpose", steps=0)
quantized("reshape", "RESHAPE", [x], [integers(2, -1)], "Reshape", {"newShape": [2, -1]}, steps=0)
quantized("resize_bilinear", "RESIZE_BILINEAR", [x], [integers(6, 7)], "ResizeBilinear", {"halfPixelCenters": True})
quantized("resize_nearest", "RESIZE_NEAREST_NEIGHBOR", [x], [integers(6, 7)], "ResizeNearestNeighbor", {}, steps=0)
quantized("batch_matmul", "BATCH_MATMUL", [random(2, 3, 4), random(2, 4, 5)], [], "BatchMatMul", {}, output=(0.1, 3))
quantized("conv", "CONV_2D", [image], [(random(6, 3, 3, 4), 0.02), (random(6), 0.001)], "Conv2D", {"padding": SAME, "strideW": 2, "strideH": 2, "fusedActivationFunction": RELU}, output=(0.1, -20))
quantized("conv_relu6", "CONV_2D", [image], [(random(6, 3, 3, 4), 0.02), (random(6), 0.001)], "Conv2D", {"padding": VALID, "strideW": 1, "strideH": 1, "fusedActivationFunction": RELU6}, output=(0.05, -20))
quantized("fully_connected", "FULLY_CONNECTED", [random(3, 8)], [(random(5, 8), 0.02), (random(5), 0.001)], "FullyConnected", {"fusedActivationFunction": RELU}, output=(0.1, -20))
