"""Operators on quantised tensors, compared with onnxruntime; see `test_onnx_frontend` for files of QDQ form."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

import tvm_split
from tests.helpers.frontends.comparison import assert_close, run_as_stage
from tests.helpers.frontends.onnx_cases import merged, node_model, random
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.frontends.building import QUANTIZED_TOLERANCE

RANDOM = np.random.default_rng(0)
MICROSOFT = {"domain": "com.microsoft"}
PER_CHANNEL = np.float32([0.01, 0.003, 0.02, 0.001])
BIAS = np.int32([5, -100, 3000, 0])
Case = tuple[str, list[np.ndarray], list[Any], dict[str, Any]]


def u8(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape).astype("uint8")


def s8(*shape: int) -> np.ndarray:
    return RANDOM.integers(-128, 128, shape).astype("int8")


def by(scale: Any, zero: int, kind: type = np.uint8) -> list[Any]:
    """A scale, for each channel if it is an array, and as many zero points."""
    return [np.float32(scale), np.full(np.shape(scale), zero, kind)[()]]


IMAGE, ROWS, STEPS = u8(1, 4, 6, 6), u8(2, 3, 8), u8(3, 8)
UNSIGNED: list[Case] = [
    ("QLinearConv", [IMAGE], [*by(0.1, 120), s8(4, 4, 3, 3), *by(0.02, 0, np.int8), *by(0.3, 128)], {"pads": [1] * 4}),
    ("QLinearConv", [IMAGE], [*by(0.1, 77), s8(4, 4, 3, 3), *by(PER_CHANNEL, 0, np.int8), *by(0.3, 9), BIAS],
     {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("QLinearConv", [IMAGE], [*by([0.1], 120), u8(4, 2, 1, 1), *by(0.01, 100), *by(0.3, 128)], {"group": 2}),
    ("QLinearMatMul", [ROWS], [*by(0.1, 120), s8(8, 4), *by(PER_CHANNEL, 0, np.int8), *by(0.3, 3)], {}),
    ("ConvInteger", [IMAGE], [u8(4, 4, 3, 3), np.uint8(120), np.uint8(7)], {"pads": [1] * 4}),
    ("ConvInteger", [IMAGE], [s8(4, 4, 3, 3)], {}),
    ("MatMulInteger", [ROWS], [s8(8, 4), np.uint8(120), np.int8(0)], {}),
    ("QGemm", [STEPS], [*by(0.1, 120), s8(8, 4), *by(0.02, 0, np.int8), BIAS, *by(0.3, 3)], MICROSOFT),
    ("QGemm", [STEPS], [*by(0.1, 120), s8(4, 8), *by(PER_CHANNEL, 0, np.int8), BIAS, *by(0.3, 3)],
     {**MICROSOFT, "transB": 1, "alpha": 0.5}),
    ("QGemm", [STEPS], [*by(0.1, 120), s8(8, 4), *by(0.02, 0, np.int8)], MICROSOFT),
    ("QLinearAdd", [STEPS], [*by(0.1, 120), u8(1, 8), *by(0.05, 20), *by(0.1, 128)], MICROSOFT),
    ("QLinearMul", [STEPS], [*by(0.1, 120), u8(3, 1), *by(0.05, 20), *by(0.1, 128)], MICROSOFT),
    ("QLinearSigmoid", [STEPS], [*by(0.1, 120), *by(1 / 256, 0)], MICROSOFT),
    ("QLinearLeakyRelu", [STEPS], [*by(0.1, 120), *by(0.05, 30)], {**MICROSOFT, "alpha": 0.3}),
    ("QLinearSoftmax", [STEPS], [*by(0.1, 120), *by(1 / 256, 0)], {**MICROSOFT, "axis": -1}),
    ("QLinearAveragePool", [IMAGE], [*by(0.1, 120), *by(0.08, 110)],
     {**MICROSOFT, "kernel_shape": [2, 2], "strides": [2, 2]}),
    ("QLinearGlobalAveragePool", [IMAGE], [*by(0.1, 120), *by(0.08, 110)], MICROSOFT),
    ("QLinearWhere", [RANDOM.random((3, 8)) > 0.5], [STEPS, *by(0.1, 120), u8(3, 8), *by(0.05, 20), *by(0.1, 128)],
     MICROSOFT),
]  # fmt: skip
SIGNED: list[Case] = [
    ("QLinearMatMul", [s8(3, 8)], [*by(0.1, -3, np.int8), s8(8, 5), *by(0.02, 7, np.int8), *by(0.3, 3, np.int8)], {}),
    ("QLinearMul", [s8(3, 8)], [*by(0.1, 20, np.int8), s8(8), *by(0.05, 2, np.int8), *by(0.1, -8, np.int8)], MICROSOFT),
]


def model_of(case: Case) -> onnx.ModelProto:
    operator, inputs, constants, options = case
    model = node_model(operator, inputs, constants, **options)
    if operator == "QLinearSoftmax":
        model.graph.node[0].attribute.append(helper.make_attribute("opset", 13))
    if "domain" not in options:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def concatenation() -> onnx.ModelProto:
    """Its values have scales of their own, behind those of the result."""
    numbers = [*by(0.1, 120), *by(0.1, 4), *by(0.2, 90)]
    model = node_model("QLinearConcat", [u8(2, 3), u8(2, 5)], numbers, axis=1, **MICROSOFT)
    node = model.graph.node[0]
    first, second, *names = node.input
    node.input[:] = [*names[:2], first, *names[2:4], second, *names[4:]]
    return model


@pytest.mark.parametrize("cases", [UNSIGNED, SIGNED])
def test_operators_of_quantised_tensors(cases: list[Case]) -> None:
    models = [*map(model_of, cases), concatenation()]
    inputs = [*(array for _, arrays, _, _ in cases for array in arrays), u8(2, 3), u8(2, 5)]
    model = load_model(merged(models), inputs)
    assert model.reference is not None
    names = [f"{place} {case[0]}" for place, case in enumerate(cases)] + ["QLinearConcat"]
    for name, actual, right in zip(names, run_as_stage(model, inputs), model.reference.outputs(inputs), strict=True):
        assert (actual.dtype, actual.shape) == (right.dtype, right.shape), name
        steps = 1 if right.dtype.itemsize == 1 else 0 if right.dtype == np.int32 else 1e-4
        np.testing.assert_allclose(actual.astype("float64"), right.astype("float64"), rtol=0, atol=steps, err_msg=name)


@pytest.mark.parametrize(
    ("operator", "options", "reason"),
    [
        ("QLinearGlobalAveragePool", {"channels_last": 1}, "its channels are the last axis"),
        ("QLinearSoftmax", {"axis": 1}, "a softmax over several axes"),
    ],
)
def test_forms_that_are_refused(operator: str, options: dict[str, Any], reason: str) -> None:
    model = node_model(operator, [IMAGE], [*by(0.1, 120), *by(0.1, 120)], **MICROSOFT, **options)
    if operator == "QLinearSoftmax":
        model.graph.node[0].attribute.append(helper.make_attribute("opset", 12))
    with pytest.raises(ModelImportError, match=reason):
        load_model(model)


class Samples(CalibrationDataReader):
    def __init__(self) -> None:
        self.samples = iter([{"x": random(1, 3, 8, 8, seed=seed)} for seed in range(3)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


@pytest.mark.parametrize("kind", ["QOperator", "QOperator, per channel", "QDQ", "QDQ, per channel", "dynamic"])
def test_whole_files_of_onnxruntime_s_quantiser(kind: str, tmp_path: Path) -> None:
    weights = {"w": random(4, 3, 3, 3), "b": random(4), "v": random(64, 5)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        helper.make_node("Sigmoid", ["c"], ["s"], name="gate"),
        helper.make_node("Mul", ["c", "s"], ["m"], name="gated"),
        helper.make_node("Add", ["m", "c"], ["a"], name="residual"),
        helper.make_node("AveragePool", ["a"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "v"], ["y"], name="head"),
    ]
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    ends = [helper.make_tensor_value_info(*end) for end in (("x", 1, [1, 3, 8, 8]), ("y", 1, [1, 5]))]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), before)
    if kind == "dynamic":
        quantize_dynamic(before, after)
    else:
        form, _, more = kind.partition(", ")
        quantize_static(before, after, Samples(), QuantFormat[form], per_channel=bool(more))
    x = random(1, 3, 8, 8)
    model = load_model(after, x)
    assert model.reference is not None
    assert model.tolerance == QUANTIZED_TOLERANCE
    cluster = tvm_split.Cluster.in_process(2)
    for layer in ("pool", "head"):
        last = next(name for name in model.layer_names if name.startswith(layer))
        split = {"machine-a": [model.layer_names[0]], "machine-b": [last]}
        with tvm_split.compile_and_deploy(model, None, cluster, split) as deployment:  # verifies
            assert_close(deployment.run(x)[0], model.reference.outputs([x])[0], 0.05)
            sent = {tensor.dtype for tensor in deployment.stages[0].outputs}
        assert kind == "dynamic" or sent == {"int8"}
