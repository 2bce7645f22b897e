"""ONNX at the edges: infinities, shifts beyond the width, rows masked altogether, tensors without elements.

Each is compiled both with TVM's default pipeline and as a stage, since either can be wrong alone.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest

from tests.helpers.frontends.comparison import assert_equal_to_source, run, run_as_stage
from tests.helpers.frontends.onnx_cases import i64, merged, node_model, random
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model

INFINITY, NAN = float("inf"), float("nan")


def check(operator: str, *inputs: np.ndarray, **options: Any) -> None:
    check_model(node_model(operator, inputs, **options), *inputs)


def check_model(source: onnx.ModelProto, *inputs: np.ndarray) -> None:
    model = load_model(source, inputs)
    for computed in (run, run_as_stage):
        assert_equal_to_source(model, inputs, computed=computed)


@contextmanager
def together() -> Iterator[Callable[..., None]]:
    """Compile all cases that are checked inside as one network; each alone if that fails, to name the failing one.

    All are of the same opset.
    """
    cases: list[tuple[onnx.ModelProto, tuple[np.ndarray, ...]]] = []
    yield lambda operator, *inputs, **options: cases.append((node_model(operator, inputs, **options), inputs))
    try:
        check_model(merged([model for model, _ in cases]), *(array for _, inputs in cases for array in inputs))
    except Exception:
        for model, inputs in cases:
            check_model(model, *inputs)
        raise


EXTREMES = np.float32([[1, 2, 3], [-INFINITY] * 3, [INFINITY] * 3])
WITH_NAN = np.float32([[NAN, 1, -1], [2, NAN, -2]]), np.float32([0, 0, NAN]), np.float32([[-1], [1]])
REGIONS = np.float32([[1, 1, 4, 4], [4, 4, 4, 4], [6, 6, 3, 3], [1, 1, 4, 1]])
ZEROS_IN_A_ROW = random(3, 4) * np.float32([[1], [0], [1]])

RARE: dict[str, list[tuple[str, tuple[np.ndarray, ...], dict[str, Any]]]] = {
    "infinities by sign": [
        ("IsInf", (np.float32([1, INFINITY, -INFINITY, NAN]),), {"detect_positive": up, "detect_negative": down})
        for up, down in itertools.product((0, 1), repeat=2)
    ],
    "blocks of space in both orders": [
        (operator, (random(2, 8, 4, 6),), {"blocksize": 2, "mode": mode, "opset": 28})
        for operator, mode in itertools.product(("SpaceToDepth", "DepthToSpace"), ("DCR", "CRD"))
    ],
    # By default the operator takes as many samples as a region has pixels: none.
    "regions without area": [
        (
            "RoiAlign", (random(1, 2, 6, 6), REGIONS, i64(0, 0, 0, 0)),
            {"opset": 16, "output_height": 2, "output_width": 2, "spatial_scale": scale},
        )
        for scale in (1.0, 0.5)
    ],
    "weights without elements": [
        ("Concat", (random(2, 3),), {"constants": [np.zeros(shape, np.float32)], "axis": shape.index(0)})
        for shape in ((0, 3), (2, 0))
    ],
    "parts without elements": [
        ("Split", (random(2, 3),), {"constants": [i64(*sizes)], "axis": 0, "outputs": len(sizes), "opset": 13})
        for sizes in ((0, 2), (2, 0), (1, 0, 0, 1))
    ],
    "norms over all axes": [
        ("RMSNormalization", (random(3, 4), random(3, 4, seed=1)), {"opset": 23, "axis": axis}) for axis in (0, -2)
    ],
    "norms of zeros": [
        ("LpNormalization", (ZEROS_IN_A_ROW,), {"axis": 1, "p": order, "opset": 22}) for order in (1, 2)
    ],
    "division by the number 0": [
        (operator, (np.array([1.5, -2, 0, NAN, INFINITY], dtype),), {"constants": [np.array(zero, dtype)], **options})
        for operator, options in (("Div", {}), ("Mod", {"fmod": 1}))
        for dtype, zero in itertools.product(("float16", "float32", "float64"), (0.0, -0.0))
    ],
    "padding with infinity": [("Pad", (random(2, 3),), {"constants": [i64(1, 0, 2, 1), np.float32(-INFINITY)]})],
}  # fmt: skip


@pytest.mark.parametrize("name", RARE)
def test_operators_at_the_edges(name: str) -> None:
    with together() as check:
        for operator, inputs, options in RARE[name]:
            check(operator, *inputs, **options)


@pytest.mark.parametrize(
    ("operator", "inputs", "options"),
    [
        *((operator, (EXTREMES,), {"constants": [i64(1)], "opset": 18}) for operator in ("ReduceMax", "ReduceMin")),
        *((operator, WITH_NAN, {}) for operator in ("Max", "Min")),
    ],
)
def test_extremes_keep_infinities_and_nan(operator: str, inputs: tuple[np.ndarray, ...], options: Any) -> None:
    model = load_model(node_model(operator, inputs, **options), inputs)
    assert_equal_to_source(model, inputs, computed=run_as_stage)


@pytest.mark.parametrize(("opset", "fmod"), [(13, 1), (28, 0)])
def test_remainders_of_infinities_and_zeros(opset: int, fmod: int) -> None:
    x = np.array([5, -5, 5, -5, INFINITY, 0, 3, NAN, 1, 5.5, -5.5, 5.5, -5.5, 0, 6])
    y = np.array([INFINITY, INFINITY, -INFINITY, -INFINITY, 2, 3, 0, 1, NAN, 2, 2, -2, -2, INFINITY, -3])
    with together() as check:
        for dtype in ("float16", "float32", "float64"):
            check("Mod", x.astype(dtype), y.astype(dtype), fmod=fmod, opset=opset)


def test_nothing_is_left_of_a_shift_beyond_the_width() -> None:
    with together() as check:
        for direction, dtype in itertools.product(("LEFT", "RIGHT"), ("uint8", "uint16", "uint32", "uint64")):
            width = np.iinfo(dtype).bits
            x = np.array([1, 255, 7, 1, 1, 200], dtype)
            bits = np.array([width, width + 1, width - 1, 100, 128, 1], dtype)
            check("BitShift", x, bits, direction=direction)
            check("BitShift", x, constants=[bits], direction=direction)


@pytest.mark.parametrize("opset", [10, 16])
def test_regions_of_an_image(opset: int) -> None:
    regions = np.float32([[0, 0, 9, 9], [1, 2, 5.5, 8], [-3, -2, 4, 4], [2, 2, 20, 20], [3, 3, 3.2, 3.2]])
    with together() as check:
        for samples in (1, 2):
            check(
                "RoiAlign", random(2, 3, 10, 12), regions, i64(0, 1, 0, 1, 1),
                opset=opset, output_height=3, output_width=4, sampling_ratio=samples, spatial_scale=0.9,
            )  # fmt: skip


def test_batch_norm_that_trains() -> None:
    parameters = [random(3), random(3, seed=1), random(3, seed=2), np.abs(random(3)) + 0.5]
    with together() as check:
        for outputs, dtype in itertools.product((1, 3), ("float32", "float16")):
            check(
                "BatchNormalization", (random(2, 3, 4, 5) * 2 + 1).astype(dtype),
                constants=[parameter.astype(dtype) for parameter in parameters],
                outputs=outputs, training_mode=1, momentum=0.7, opset=15,
            )  # fmt: skip


def test_softmax_of_rows_of_infinities_and_nan() -> None:
    with together() as check:
        for operator, dtype in itertools.product(("Softmax", "LogSoftmax"), ("float32", "float16")):
            x = random(6, 17).astype(dtype)
            x[1], x[2, 1:], x[3, 0], x[4, 1], x[5] = -INFINITY, -INFINITY, INFINITY, NAN, np.finfo(dtype).min
            check(operator, x, opset=13, axis=1)
            check(operator, np.ascontiguousarray(x.T), opset=13, axis=0)


def test_attention_to_nothing_is_zero() -> None:
    mask = np.ones((4, 4), bool)
    mask[1], mask[2, 1] = False, False
    inputs = (random(1, 2, 4, 8), random(1, 2, 4, 8, seed=1), random(1, 2, 4, 8, seed=2), mask)
    model = load_model(node_model("Attention", inputs, opset=23), inputs)
    assert_equal_to_source(model, inputs, computed=run_as_stage)


def test_attention_without_some_of_its_inputs() -> None:
    query, key, value = random(1, 2, 4, 8), random(1, 2, 4, 8, seed=1), random(1, 2, 4, 8, seed=2)
    inputs = (query, key, value, None, random(1, 2, 3, 8), random(1, 2, 3, 8, seed=3))
    model = load_model(node_model("Attention", inputs, outputs=3, opset=24, is_causal=1))
    arrays = [array for array in inputs if array is not None]
    assert set(model.layers.values()) == {"node"}
    for computed in (run, run_as_stage):
        assert_equal_to_source(model, arrays, computed=computed)


def test_inputs_that_are_no_tensors_are_refused() -> None:
    node = onnx.helper.make_node("SequenceAt", ["s", "i"], ["y"], name="at")
    sequence = onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, [2])
    place = onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [sequence, place], [result]), ir_version=10)
    with pytest.raises(ModelImportError, match=r"input 's' is not a tensor but of type sequence"):
        load_model(model)
    strings = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [2])
    same = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, [2])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    with pytest.raises(ModelImportError, match=r"input 'x' is of strings"):
        load_model(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [strings], [same]), ir_version=10))


def test_constants_of_strings_are_refused() -> None:
    words = np.array(["a", "b"])
    with pytest.raises(ModelImportError, match=r"constant 'c0' \(node\) is of strings"):
        load_model(node_model("Where", [np.array([True, False])], constants=[words, words]))


def test_what_onnxruntime_refuses_only_while_it_runs_is_compared_with_onnx_s_own_evaluator() -> None:
    """Attention with a past, whose present outputs are not requested."""
    query, key, value = random(1, 2, 3, 8), random(1, 2, 4, 8, seed=1), random(1, 2, 4, 8, seed=2)
    past = random(1, 2, 5, 8, seed=3), random(1, 2, 5, 8, seed=4)
    inputs = (query, key, value, None, *past)
    model = load_model(node_model("Attention", inputs, opset=23), [array for array in inputs if array is not None])
    assert_equal_to_source(model, (query, key, value, *past))


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_parts_that_are_left_out(opset: int) -> None:
    """onnxruntime crashes on a Split with an output of the name "", as ONNX calls one that is left out."""
    x = random(2, 6)
    options: dict[str, Any] = {"split": [1, 2, 3]} if opset < 13 else {"constants": [i64(1, 2, 3)]}
    for left_out in ((0,), (2,), (0, 1)):
        model = node_model("Split", [x], outputs=3, opset=opset, axis=1, **options)
        for place in sorted(left_out, reverse=True):
            model.graph.node[0].output[place] = ""
            del model.graph.output[place]
        check_model(model, x)


def without_readers(operator: str, *inputs: np.ndarray, outputs: int, **options: Any) -> onnx.ModelProto:
    """A model of one node, of whose outputs only the first is read."""
    model = node_model(operator, inputs, outputs=outputs, **options)
    del model.graph.output[1:]
    return model


STATISTICS = [random(3), random(3), random(3), np.abs(random(3)) + 0.5]


@pytest.mark.parametrize(
    ("operator", "opset", "outputs", "options"),
    [
        *(("Dropout", opset, 2, {}) for opset in (10, 12, 13)),
        *(("MaxPool", opset, 2, {"kernel_shape": [2, 2]}) for opset in (8, 12)),
        ("LayerNormalization", 17, 3, {"constants": [random(4), random(4)]}),
        ("BatchNormalization", 8, 5, {"constants": STATISTICS}),
        ("BatchNormalization", 15, 3, {"constants": STATISTICS, "training_mode": 1}),
        ("TopK", 11, 2, {"constants": [i64(2)]}),
    ],
)
def test_outputs_that_nobody_reads_are_no_reason_to_refuse(
    operator: str, opset: int, outputs: int, options: dict[str, Any]
) -> None:
    x = random(2, 3, 4, 4)
    model = load_model(without_readers(operator, x, outputs=outputs, opset=opset, **options), [x])
    assert_equal_to_source(model, [x])


@pytest.mark.parametrize(
    ("operator", "options"),
    [("MaxPool", {"kernel_shape": [2, 2]}), ("LayerNormalization", {"constants": [random(4), random(4)]})],
)
def test_an_output_that_is_read_and_cannot_be_imported_is_refused(operator: str, options: dict[str, Any]) -> None:
    with pytest.raises(ModelImportError, match=rf"{operator} of layer 'node'.*only the first 1 of its outputs"):
        load_model(node_model(operator, [random(1, 1, 4, 4)], outputs=2, **options))


COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric", "align_corners")
SCALES = [np.float32([1, 1, *scales]) for scales in ((1.3, 0.7), (2.6, 3.49), (0.37, 1.5))]
"""None gives whole sizes of an image of 7 x 6 pixels."""


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_resizing_to_the_nearest_pixel(rounding: str) -> None:
    x = random(1, 2, 7, 6)
    with together() as check:
        for mode, scales in itertools.product(COORDINATES, SCALES):
            options = {"coordinate_transformation_mode": mode, "nearest_mode": rounding}
            check("Resize", x, constants=[None, scales], mode="nearest", opset=19, **options)
        check("Resize", x, constants=[None, None, i64(1, 2, 11, 4)], mode="nearest", nearest_mode=rounding, opset=19)


@pytest.mark.parametrize("method", ["linear", "cubic"])
def test_resizing_with_weights(method: str) -> None:
    x = random(1, 2, 7, 6)
    with together() as check:
        for mode, scales in itertools.product(COORDINATES, SCALES):
            check("Resize", x, constants=[None, scales], mode=method, coordinate_transformation_mode=mode, opset=19)
        for mode in COORDINATES:
            sizes = i64(1, 2, 11, 4)
            options = {"mode": method, "coordinate_transformation_mode": mode}
            check("Resize", x, constants=[None, None, sizes], opset=19, **options)
            check("Resize", x, constants=[None, SCALES[2]], antialias=1, opset=19, **options)
        check("Resize", random(1, 1, 70, 66), constants=[None, SCALES[0]], mode=method, opset=19)


def test_resizing_with_rare_attributes() -> None:
    x = random(1, 2, 7, 6)
    with together() as check:
        check("Resize", x, constants=[None, None, i64(10, 15)], axes=[2, 3], mode="linear", opset=19)
        for scales in SCALES:
            options = {"constants": [None, scales], "opset": 19, "exclude_outside": 1}
            check("Resize", x, mode="cubic", cubic_coeff_a=-0.5, **options)
            check("Resize", x, mode="linear", antialias=1, **options)
        for method, last in itertools.product(("nearest", "linear", "cubic"), (0.8, 1.4)):
            check(
                "Resize", x, constants=[np.float32([0, 0, 0.2, -0.3, 1, 1, 0.7, last]), SCALES[1]],
                coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=5.0, mode=method, opset=19,
            )  # fmt: skip


def test_resizing_in_one_and_three_axes_and_of_integers() -> None:
    with together() as check:
        for method in ("nearest", "linear"):
            check("Resize", random(2, 3, 7), constants=[None, np.float32([1, 1, 1.7])], mode=method)
            check("Resize", random(1, 2, 3, 4, 5), constants=[None, np.float32([1, 1, 1.7, 0.6, 2])], mode=method)
        for dtype in ("uint8", "int32", "float16"):
            x = np.arange(42).reshape(1, 1, 7, 6).astype(dtype)
            check("Resize", x, constants=[None, np.float32([1, 1, 1.3, 2])], mode="nearest")


@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 9), ("Resize", 10), ("Resize", 11)])
def test_resizing_in_old_forms(operator: str, opset: int, capfd: pytest.CaptureFixture[str]) -> None:
    x, nothing = random(1, 2, 7, 6), np.zeros(0, np.float32)
    with together() as check:
        for scales, method in itertools.product(SCALES[:2], ("nearest", "linear")):
            scales = np.maximum(scales, 1) if operator == "Upsample" else scales
            check(operator, x, constants=[scales] if opset < 11 else [nothing, scales], mode=method, opset=opset)
        if opset == 11:
            options = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "opset": opset}
            check("Resize", x, constants=[nothing, SCALES[1]], **options)
            check("Resize", x, constants=[nothing, nothing, i64(1, 2, 3, 11)], **options)
    assert "deprecated" not in capfd.readouterr().err
