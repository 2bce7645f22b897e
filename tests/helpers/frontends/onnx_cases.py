# ruff: noqa: E501
# fmt: off
"""The table of the ONNX sweep: one tiny model for each operator and each way of using it that TVM could get wrong."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A model of one node, and inputs for it."""

    name: str
    model: onnx.ModelProto
    inputs: tuple[Array, ...]


CASES: list[Case] = []


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(dtype)


def node_model(
    operator: str, inputs: Sequence[Array | None], constants: Sequence[Array | None] = (), outputs: int = 1, opset: int = 17,
    domain: str = "", **attributes: Any,
) -> onnx.ModelProto:  # fmt: skip
    """A model with one node named ``node``; None leaves an input out; constants follow the inputs."""
    names = ["" if array is None else f"x{index}" for index, array in enumerate(inputs)]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    weights = [
        numpy_helper.from_array(np.asarray(array), f"c{index}") for index, array in enumerate(constants) if array is not None
    ]
    names += ["" if array is None else f"c{index}" for index, array in enumerate(constants)]
    results = [f"y{index}" for index in range(outputs)]
    node = helper.make_node(operator, names, results, name="node", domain=domain, **attributes)
    infos = [onnx.ValueInfoProto(name=name) for name in results]
    graph = helper.make_graph([node], "case", values, infos, weights)
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model)
    for info, inferred_info in zip(model.graph.output, inferred.graph.output, strict=True):
        info.type.CopyFrom(inferred_info.type)
    return model


def merged(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """All models of one opset in one; the names of the first begin with ``case_0_``."""
    graphs = [onnx.compose.add_prefix(model, f"case_{index}_").graph for index, model in enumerate(models)]
    graph = reduce(lambda whole, addition: onnx.compose.merge_graphs(whole, addition, []), graphs)
    first = models[0]
    assert all(model.opset_import == first.opset_import for model in models)
    return helper.make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version)


def case(name: str, operator: str, *inputs: Array | None, **options: Any) -> None:
    arrays = tuple(array for array in inputs if array is not None)
    CASES.append(Case(name, node_model(operator, inputs, **options), arrays))


def i64(*values: Any) -> Array:
    return np.array(values, dtype=np.int64)


_x = random(1, 3, 8, 9)
_w = random(4, 3, 3, 3)
case("conv", "Conv", _x, constants=[_w, random(4)], pads=[1, 1, 1, 1])
case("conv_same_upper", "Conv", _x, constants=[random(4, 3, 2, 4)], auto_pad="SAME_UPPER", strides=[2, 2])
case("conv_same_lower", "Conv", _x, constants=[random(4, 3, 2, 4)], auto_pad="SAME_LOWER")
case("conv_asymmetric", "Conv", _x, constants=[_w], pads=[0, 1, 2, 0], dilations=[1, 2])
case("conv_groups", "Conv", random(1, 4, 6, 6), constants=[random(4, 2, 3, 3)], group=2)
case("conv_1d", "Conv", random(1, 3, 9), constants=[random(4, 3, 3)], pads=[2, 0])
case("conv_3d", "Conv", random(1, 2, 4, 4, 4), constants=[random(3, 2, 2, 2, 2)])
case("conv_half", "Conv", random(1, 3, 6, 6, dtype="float16"), constants=[random(4, 3, 3, 3, dtype="float16"), random(4, dtype="float16")])
case("conv_transpose", "ConvTranspose", random(1, 3, 4, 4), constants=[random(3, 2, 3, 3), random(2)], strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
case("conv_transpose_shape", "ConvTranspose", random(1, 3, 4, 4), constants=[random(3, 2, 3, 3)], strides=[2, 2], output_shape=[8, 8])
for _mode, _size in itertools.product(("SAME_UPPER", "SAME_LOWER", "VALID"), (1, 2, 4)):
    case(f"conv_transpose_{_mode}_{_size}".lower(), "ConvTranspose", random(1, 3, 4, 5), constants=[random(3, 2, _size, _size)], strides=[3, 3], auto_pad=_mode)
    case(f"conv_{_mode}_{_size}".lower(), "Conv", random(1, 3, 8, 9), constants=[random(4, 3, _size, _size)], strides=[3, 2], auto_pad=_mode)
case("conv_transpose_groups", "ConvTranspose", random(1, 4, 4, 4), constants=[random(4, 2, 3, 3)], group=2)
case("gemm", "Gemm", random(3, 4), constants=[random(5, 4), random(5)], transB=1, alpha=0.5, beta=2.0)
case("gemm_transposed", "Gemm", random(4, 3), constants=[random(4, 5)], transA=1)
case("gemm_half", "Gemm", random(3, 4, dtype="float16"), constants=[random(4, 5, dtype="float16"), random(5, dtype="float16")])
case("matmul_4d", "MatMul", random(2, 3, 4, 5), random(3, 5, 2))
case("matmul_1d", "MatMul", random(4), random(4, 5))
case("matmul_integer", "MatMul", np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(6, dtype=np.int32).reshape(3, 2))
for _opset in (9, 14, 17):
    case(f"batch_norm_{_opset}", "BatchNormalization", _x, constants=[random(3), random(3), random(3), np.abs(random(3)) + 0.5], opset=_opset)
case("instance_norm", "InstanceNormalization", _x, constants=[random(3), random(3)])
case("layer_norm", "LayerNormalization", random(2, 3, 4), constants=[random(4), random(4)])
case("layer_norm_two_axes", "LayerNormalization", random(2, 3, 4), constants=[random(3, 4)], axis=-2)
case("layer_norm_broadcast", "LayerNormalization", random(2, 3, 4), constants=[random(4), random(1)], axis=1)
case("rms_norm_broadcast", "RMSNormalization", random(2, 3, 4), constants=[random(4)], axis=1, opset=23)
case("group_norm", "GroupNormalization", random(2, 4, 3, 3), constants=[random(4), random(4)], num_groups=2, opset=21)
case("lrn", "LRN", _x, size=3)
case("lp_norm", "LpNormalization", random(3, 4), axis=-1, p=2)
for _name in ("Relu", "Sigmoid", "Tanh", "Elu", "Selu", "LeakyRelu", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Erf",
              "Exp", "Abs", "Neg", "Floor", "Ceil", "Sign", "Sin", "Cos", "Atan", "Sinh", "Mish", "ThresholdedRelu", "Celu"):
    case(_name.lower(), _name, random(3, 4), opset=18)
case("round", "Round", np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.3], np.float32))
case("gelu", "Gelu", random(3, 4), opset=20)
case("gelu_tanh", "Gelu", random(3, 4), opset=20, approximate="tanh")
case("elu_alpha", "Elu", random(3, 4), alpha=0.5)
case("hard_sigmoid_alpha", "HardSigmoid", random(3, 4), alpha=0.3, beta=0.4)
case("celu_alpha", "Celu", random(3, 4), alpha=2.0)
case("prelu", "PRelu", _x, constants=[random(3, 1, 1)])
case("prelu_channels", "PRelu", _x, constants=[random(3)], opset=6)
case("clip", "Clip", random(3, 4), constants=[np.float32(-0.5), np.float32(0.5)])
case("clip_minimum", "Clip", random(3, 4), constants=[np.float32(-0.5)])
case("clip_maximum", "Clip", random(3, 4), constants=[None, np.float32(0.5)])
case("squeeze_9", "Squeeze", random(1, 3, 1), axes=[0, 2], opset=9)
case("squeeze_11", "Squeeze", random(1, 3, 1), opset=11)
for _name, _data in {"": random(2, 6), "_positive": np.abs(random(2, 6)) + 1, "_zeros": np.zeros((2, 6), np.float32)}.items():
    case(f"dynamic_quantize{_name}", "DynamicQuantizeLinear", _data, outputs=3, opset=11)
case("reduce_logsumexp_infinite", "ReduceLogSumExp", np.float32([[-np.inf, -np.inf], [np.inf, 1], [0, 1]]), axes=[1])
case("clip_6", "Clip", random(3, 4), opset=6, min=-0.5, max=0.5)
case("clip_integers", "Clip", i64(-5, 0, 5), constants=[np.int64(-2), np.int64(3)])
for _opset in (11, 13):
    case(f"softmax_{_opset}", "Softmax", random(2, 3, 4), opset=_opset)
    case(f"softmax_{_opset}_axis", "Softmax", random(2, 3, 4), opset=_opset, axis=1)
    case(f"log_softmax_{_opset}", "LogSoftmax", random(2, 3, 4), opset=_opset, axis=1)
case("max_pool", "MaxPool", _x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
case("max_pool_ceil", "MaxPool", _x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
case("max_pool_same", "MaxPool", _x, kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER")
case("max_pool_same_lower", "MaxPool", _x, kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_LOWER")
case("max_pool_dilations", "MaxPool", _x, kernel_shape=[2, 2], dilations=[2, 2])
case("average_pool", "AveragePool", _x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
case("average_pool_include", "AveragePool", _x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
case("average_pool_same", "AveragePool", _x, kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")
case("average_pool_ceil", "AveragePool", _x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
case("lp_pool", "LpPool", _x, kernel_shape=[2, 2], p=2)
case("global_average_pool", "GlobalAveragePool", _x)
case("global_max_pool", "GlobalMaxPool", _x)
case("gather", "Gather", random(5, 4), constants=[i64(0, 3, 1)])
case("gather_negative", "Gather", random(5, 4), constants=[i64(-1, -5, 2)])
case("gather_negative_input", "Gather", random(5, 4), i64(-1, -5, 2))
case("gather_axis", "Gather", random(5, 4, 3), constants=[np.array([[-1, 0], [1, -2]])], axis=-2)
case("gather_scalar", "Gather", random(5, 4), constants=[np.int64(-1)], axis=1)
case("gather_elements", "GatherElements", random(3, 4), np.array([[0, -1, 2, 0], [-2, 1, 1, -3], [2, 2, -1, 0]]), axis=0)
case("gather_nd", "GatherND", random(3, 4, 2), np.array([[0, -1], [-2, 1]]))
case("scatter_elements", "ScatterElements", random(3, 4), np.array([[0, -1], [-2, 1]]), random(2, 2), axis=1)
case("scatter_elements_add", "ScatterElements", random(3, 4), np.array([[0, 0], [-2, 1]]), random(2, 2), axis=1, reduction="add", opset=18)
case("scatter_nd", "ScatterND", random(4, 3), np.array([[-1], [1]]), random(2, 3))
case("slice", "Slice", random(5, 8), constants=[i64(1, -3), i64(4, 100), i64(0, 1)])
case("slice_negative_step", "Slice", random(5, 8), constants=[i64(-1), i64(-9), i64(1), i64(-2)])
case("slice_1", "Slice", random(5, 8), opset=9, starts=[1, 2], ends=[-1, 6])
case("split", "Split", random(2, 8), outputs=3, constants=[i64(3, 3, 2)], axis=1)
case("split_equal", "Split", random(2, 8), outputs=4, axis=-1, opset=13)
case("split_uneven", "Split", random(2, 8), outputs=3, axis=-1, num_outputs=3, opset=18)
case("concat", "Concat", random(2, 3), random(2, 4), axis=-1)
case("reshape", "Reshape", random(2, 3, 4), constants=[i64(0, -1)])
case("reshape_allow_zero", "Reshape", random(2, 3, 4), constants=[i64(4, 6)], allowzero=1)
case("flatten", "Flatten", random(2, 3, 4), axis=2)
case("flatten_negative", "Flatten", random(2, 3, 4), axis=-1)
case("flatten_zero", "Flatten", random(2, 3, 4), axis=0)
case("transpose", "Transpose", random(2, 3, 4), perm=[2, 0, 1])
case("transpose_default", "Transpose", random(2, 3, 4))
case("squeeze", "Squeeze", random(2, 1, 3, 1), constants=[i64(-1)])
case("squeeze_all", "Squeeze", random(2, 1, 3, 1))
case("unsqueeze", "Unsqueeze", random(2, 3), constants=[i64(0, -1)])
case("unsqueeze_11", "Unsqueeze", random(2, 3), opset=11, axes=[0, 3])
case("expand", "Expand", random(3, 1), constants=[i64(2, 1, 4)])
case("tile", "Tile", random(2, 3), constants=[i64(2, 3)])
case("pad", "Pad", random(2, 3), constants=[i64(1, 0, 2, 1), np.float32(1.5)])
case("pad_reflect", "Pad", random(3, 4), constants=[i64(1, 2, 0, 1)], mode="reflect")
case("pad_edge", "Pad", random(3, 4), constants=[i64(1, 2, 0, 1)], mode="edge")
case("pad_negative", "Pad", random(3, 6), constants=[i64(0, -1, 0, 2)])
case("depth_to_space", "DepthToSpace", random(1, 8, 2, 3), blocksize=2)
case("depth_to_space_crd", "DepthToSpace", random(1, 8, 2, 3), blocksize=2, mode="CRD")
case("space_to_depth", "SpaceToDepth", random(1, 2, 4, 6), blocksize=2)
for _kind in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare", "LogSum"):
    _data = np.abs(random(2, 3, 4)) + 0.1
    case(f"reduce_{_kind.lower()}_13", f"Reduce{_kind}", _data, opset=11, axes=[-1], keepdims=0)
    case(f"reduce_{_kind.lower()}_18", f"Reduce{_kind}", _data, opset=18, constants=[i64(0, 2)])
    for _dtype in ("float16", "float32"):
        case(f"reduce_{_kind.lower()}_noop_{_dtype}", f"Reduce{_kind}", random(2, 3, dtype=_dtype), opset=18, noop_with_empty_axes=1)
for _kind in ("Mean", "L2", "SumSquare", "LogSum"):
    case(f"reduce_{_kind.lower()}_int", f"Reduce{_kind}", np.int32([[5, 3], [7, 8]]), opset=18, constants=[i64(1)])
case("reduce_mean_negative_int", "ReduceMean", i64(-5, -2), opset=18)
case("thresholded_relu_half", "ThresholdedRelu", random(3, 4, dtype="float16"), alpha=0.25)
case("reduce_all", "ReduceMean", random(2, 3), opset=11)
case("reduce_noop", "ReduceSum", random(2, 3), opset=13, noop_with_empty_axes=1)
case("reduce_mean_half", "ReduceMean", random(4, 64, dtype="float16"), opset=11, axes=[1])
case("argmax", "ArgMax", random(3, 4), axis=-1, keepdims=0)
case("argmin", "ArgMin", random(3, 4), axis=0)
case("argmax_last", "ArgMax", np.zeros((2, 3), np.float32), axis=1, select_last_index=1)
case("topk", "TopK", random(3, 6), constants=[i64(2)], outputs=2)
case("topk_of_nothing", "TopK", random(3, 6), constants=[i64(0)], outputs=2)
case("reduce_max_booleans", "ReduceMax", random(3, 4) > 0, constants=[i64(1)], opset=20)
case("equal_booleans", "Equal", random(3, 4) > 0, random(3, 4, seed=1) > 0)
case("topk_int8", "TopK", np.array([[3, -4, 7], [5, 0, -1]], np.int8), constants=[i64(2)], outputs=2)
case("topk_smallest", "TopK", random(6, 3), constants=[i64(3)], outputs=2, axis=0, largest=0)
case("cumsum", "CumSum", random(3, 4), constants=[np.int64(1)])
case("cumsum_exclusive", "CumSum", random(3, 4), constants=[np.int64(0)], exclusive=1, reverse=1)
case("cumsum_negative_axis", "CumSum", random(3, 4), constants=[np.int64(-1)])
case("einsum", "Einsum", random(2, 3, 4), random(2, 4, 5), equation="bij,bjk->bik")
case("where", "Where", np.array([[True], [False]]), random(2, 3), random(3))
case("equal", "Equal", i64(1, 2, 3), i64(1, 0, 3))
case("greater", "Greater", random(3), random(3, seed=5))
case("less_or_equal", "LessOrEqual", i64(1, 2, 3), i64(1, 0, 3))
case("and", "And", np.array([True, False]), np.array([True, True]))
case("not", "Not", np.array([True, False]))
case("add_broadcast", "Add", random(2, 3, 4), random(3, 1))
case("div_integers", "Div", i64(-7, 7, -8, 8), i64(2, -2, 3, 3))
case("mod_integers", "Mod", i64(-7, 7, -8, 8), i64(2, -2, 3, 3))
case("mod_fmod", "Mod", random(6), random(6, seed=3), fmod=1)
case("mod_fmod_integers", "Mod", i64(-7, 7, -8, 8), i64(2, -2, 3, 3), fmod=1)
case("pow", "Pow", np.abs(random(3)) + 0.1, random(3, seed=2))
case("pow_computed_exponent", "Pow", random(2, 4), np.float32([2, 3, -1, 0]))
case("pow_negative_base", "Pow", random(3), constants=[np.float32(2)])
case("pow_integer_exponent", "Pow", random(3), constants=[np.int64(3)])
case("pow_integers", "Pow", i64(2, -3), constants=[np.int64(3)])
case("pow_integers_roots", "Pow", i64(3, 8, 10, 2, 1), np.float32([0.5, 0.5, 2, -1, -3]))
case("pow_integers_negative", "Pow", i64(2, -2, 1, 3), i64(-1, -1, -2, 4))
case("sqrt", "Sqrt", np.abs(random(3)))
case("reciprocal", "Reciprocal", random(3))
case("log", "Log", np.abs(random(3)) + 0.1)
case("max", "Max", random(3), random(3, seed=1), random(1, seed=2))
case("mean", "Mean", random(2, 3), random(3, seed=1))
case("sum", "Sum", random(2, 3), random(3, seed=1))
case("cast_integer", "Cast", np.array([-2.7, 0.5, 2.7], np.float32), to=onnx.TensorProto.INT64)
case("cast_bool", "Cast", np.array([-2.7, 0.0, 0.5], np.float32), to=onnx.TensorProto.BOOL)
case("cast_half", "Cast", random(3), to=onnx.TensorProto.FLOAT16)
case("sign_nan", "Sign", np.float32([np.nan, -np.inf, -0.0, 1e-40]))
case("is_nan", "IsNaN", np.array([1, np.nan], np.float32))
case("is_inf", "IsInf", np.array([1, np.inf, -np.inf], np.float32))
case("trilu", "Trilu", random(4, 5), constants=[np.int64(1)], upper=0)
case("one_hot", "OneHot", i64(0, 2, -1), constants=[np.int64(4), np.array([0, 5], np.float32)])
case("one_hot_float_depth", "OneHot", i64(0, 2, -1), constants=[np.float32(4), np.array([0, 5], np.float32)])
case("identity", "Identity", random(3))
case("dropout", "Dropout", random(3, 4))
case("bitshift", "BitShift", np.array([1, 2, 8], np.uint8), constants=[np.array([1, 2, 1], np.uint8)], direction="LEFT")
case("quantize", "QuantizeLinear", random(3, 4), constants=[np.float32(0.1), np.uint8(128)])
case("dequantize", "DequantizeLinear", np.array([0, 128, 255], np.uint8), constants=[np.float32(0.1), np.uint8(128)])
case("matmul_half", "MatMul", random(2, 3, dtype="float16"), random(3, 4, dtype="float16"))
case("layer_norm_half", "LayerNormalization", random(2, 8, dtype="float16"), constants=[random(8, dtype="float16"), random(8, dtype="float16")])
case("attention_23", "Attention", random(1, 2, 3, 4), random(1, 2, 5, 4), random(1, 2, 5, 4), opset=23)
case("rms_norm", "RMSNormalization", random(2, 3, 4), constants=[random(4)], opset=23)
