"""ONNX at the edges: infinities, shifts beyond the width, rows masked altogether, tensors without elements.

Each is compiled both with TVM's default pipeline and as a stage, since either can be wrong alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from tests.helpers.frontends.comparison import assert_equal_to_source, run, run_as_stage  # noqa: E402
from tests.helpers.frontends.onnx_cases import i64, node_model, random  # noqa: E402
from tvm_split.errors import ModelImportError, ReferenceFailedError  # noqa: E402
from tvm_split.frontends import load_model  # noqa: E402

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
    graphs = [onnx.compose.add_prefix(model, f"case_{index}_").graph for index, (model, _) in enumerate(cases)]
    graph = reduce(lambda merged, addition: onnx.compose.merge_graphs(merged, addition, []), graphs)
    first, _ = cases[0]
    assert all(model.opset_import == first.opset_import for model, _ in cases)
    whole = onnx.helper.make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version)
    try:
        check_model(whole, *(array for _, inputs in cases for array in inputs))
    except Exception:
        for model, inputs in cases:
            check_model(model, *inputs)
        raise


def test_infinities_are_told_by_sign() -> None:
    x = np.float32([1, INFINITY, -INFINITY, NAN])
    with together() as check:
        for positive, negative in itertools.product((0, 1), repeat=2):
            check("IsInf", x, detect_positive=positive, detect_negative=negative)


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


def test_blocks_of_space_in_both_orders() -> None:
    with together() as check:
        for operator, mode in itertools.product(("SpaceToDepth", "DepthToSpace"), ("DCR", "CRD")):
            check(operator, random(2, 8, 4, 6), blocksize=2, mode=mode, opset=28)


@pytest.mark.parametrize(("opset", "cases"), [(10, {"avg": 1, "max": 2}), (16, {"avg": 2, "max": 1})])
def test_regions_of_an_image(opset: int, cases: dict[str, int]) -> None:
    """Every two of opset, mode and number of samples meet: the maximum of more samples takes long to compile."""
    regions = np.float32([[0, 0, 9, 9], [1, 2, 5.5, 8], [-3, -2, 4, 4], [2, 2, 20, 20], [3, 3, 3.2, 3.2]])
    with together() as check:
        for mode, samples in cases.items():
            check(
                "RoiAlign", random(2, 3, 10, 12), regions, i64(0, 1, 0, 1, 1),
                opset=opset, mode=mode, output_height=3, output_width=4, sampling_ratio=samples, spatial_scale=0.9,
            )  # fmt: skip


def test_regions_without_area() -> None:
    """By default the operator takes as many samples as a region has pixels: none."""
    regions = np.float32([[1, 1, 4, 4], [4, 4, 4, 4], [6, 6, 3, 3], [1, 1, 4, 1]])
    with together() as check:
        for scale in (1.0, 0.5):
            options = {"opset": 16, "output_height": 2, "output_width": 2, "spatial_scale": scale}
            check("RoiAlign", random(1, 2, 6, 6), regions, i64(0, 0, 0, 0), **options)


def test_the_maximum_of_a_number_of_samples_that_depends_on_the_region_is_refused() -> None:
    x, regions, images = random(1, 1, 4, 4), np.zeros((1, 4), np.float32), i64(0)
    model = node_model("RoiAlign", [x, regions, images], mode="max")
    with pytest.raises(ModelImportError, match=r"RoiAlign of layer 'node'.*sampling_ratio"):
        load_model(model)


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


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_extremes_of_infinities(operator: str) -> None:
    x = np.float32([[1, 2, 3], [-INFINITY] * 3, [INFINITY] * 3])
    model = load_model(node_model(operator, [x], constants=[i64(1)], opset=18), [x])
    assert_equal_to_source(model, [x], computed=run_as_stage)


@pytest.mark.parametrize("operator", ["Max", "Min"])
def test_nan_stays_in_a_maximum_of_tensors(operator: str) -> None:
    x = np.float32([[NAN, 1, -1], [2, NAN, -2]])
    inputs = x, np.float32([0, 0, NAN]), np.float32([[-1], [1]])
    assert_equal_to_source(load_model(node_model(operator, inputs), inputs), inputs, computed=run_as_stage)


def test_weights_without_elements() -> None:
    with together() as check:
        for shape in ((0, 3), (2, 0)):
            check("Concat", random(2, 3), constants=[np.zeros(shape, np.float32)], axis=shape.index(0))


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
    with pytest.raises(ModelImportError, match=r"input 's' is no tensor but of type sequence"):
        load_model(model)
    strings = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [2])
    same = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, [2])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    with pytest.raises(ModelImportError, match=r"input 'x' is of strings"):
        load_model(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [strings], [same]), ir_version=10))


def test_rms_norm_over_all_axes() -> None:
    with together() as check:
        for axis in (0, -2):
            check("RMSNormalization", random(3, 4), random(3, 4, seed=1), opset=23, axis=axis)


def test_a_row_of_zeros_is_normalized_to_zeros() -> None:
    x = random(3, 4)
    x[1] = 0
    with together() as check:
        for order in (1, 2):
            check("LpNormalization", x, axis=1, p=order, opset=22)


def test_padding_with_infinity() -> None:
    check("Pad", random(2, 3), constants=[i64(1, 0, 2, 1), np.float32(-INFINITY)])


def test_constants_of_strings_are_refused() -> None:
    words = np.array(["a", "b"])
    with pytest.raises(ModelImportError, match=r"constant 'c0' \(node\) is of strings"):
        load_model(node_model("Where", [np.array([True, False])], constants=[words, words]))


def test_parts_without_elements() -> None:
    with together() as check:
        for sizes in ((0, 2), (2, 0), (1, 0, 0, 1)):
            check("Split", random(2, 3), constants=[i64(*sizes)], axis=0, outputs=len(sizes), opset=13)


def test_what_onnxruntime_refuses_only_while_it_runs_is_compared_with_onnx_s_own_evaluator() -> None:
    """Attention with a past, whose present outputs are not requested."""
    query, key, value = random(1, 2, 3, 8), random(1, 2, 4, 8, seed=1), random(1, 2, 4, 8, seed=2)
    past = random(1, 2, 5, 8, seed=3), random(1, 2, 5, 8, seed=4)
    inputs = (query, key, value, None, *past)
    model = load_model(node_model("Attention", inputs, opset=23), [array for array in inputs if array is not None])
    assert_equal_to_source(model, (query, key, value, *past))


def test_a_file_that_crashes_onnxruntime_is_refused_with_the_way_on() -> None:
    """An output of the name "" is one that is left out, which onnxruntime does not expect of ``Split``."""
    model = node_model("Split", [random(2, 4)], outputs=2, opset=18, axis=1, num_outputs=2)
    model.graph.node[0].output[0] = ""
    del model.graph.output[0]
    loaded = load_model(model)
    with pytest.raises(ReferenceFailedError, match=r"SIGSEGV.*verify=False"):
        loaded.reference.outputs([random(2, 4)])
    assert run(loaded, [random(2, 4)])[0].shape == (2, 2)
