"""TFLite files as TensorFlow's converter writes them, split over two workers by the layers' names, against LiteRT."""

from pathlib import Path

import numpy as np
import pytest

import tvm_split
from tests.helpers.frontends.comparison import run, run_split
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.tflite_files import Writer
from tests.helpers.frontends.tflite_networks import SAME, network
from tvm_split.compiler.verification import first_differing_layer
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.frontends.building import QUANTIZED_TOLERANCE

LAYERS = ("stem", "norm", "act", "block/conv", "skip", "block/conv@1", "pool", "head")


def image_of(model: tvm_split.Model) -> np.ndarray:
    (spec,) = model.inputs
    generator = np.random.default_rng(1)
    if spec.dtype == "int8":
        return generator.integers(-128, 128, spec.shape).astype("int8")
    return generator.standard_normal(spec.shape).astype("float32")


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_answers_over_two_workers_are_those_of_litert(
    kind: str, three_workers: tvm_split.Cluster, tmp_path: Path
) -> None:
    (tmp_path / "net.tflite").write_bytes(network(kind))
    model = load_model(tmp_path / "net.tflite", batch=2)
    assert_keeps_contract(model)
    assert (model.name, model.layer_names) == ("net", LAYERS)
    x = image_of(model)
    model = load_model(tmp_path / "net.tflite", x)  # of integers, only what is given can be compared
    assert model.tolerance == (QUANTIZED_TOLERANCE if kind == "int8" else None)
    (expected,) = model.reference.outputs([x])
    (actual,) = run_split(model, [x], ("stem", "skip"), three_workers)
    assert (actual.dtype, actual.shape) == (expected.dtype, (2, 5))
    if kind == "int8":
        assert np.abs(actual.astype("int64") - expected).max() <= 1  # of 256 steps
    else:
        assert np.abs(actual - expected).max() < 1e-4 * np.ptp(expected)
        assert first_differing_layer(model, model.reference, [x]) is None


def test_channels_last_cost_one_transposition() -> None:
    model = load_model(network(), batch=1)
    assert model.module.script(show_meta=False).count("R.permute_dims(") == 1


@pytest.mark.parametrize(
    ("before", "crops", "is_one"), [([2, 2, 2, 3], [0, 0, 0, 1], True), ([0, 2, 0, 3], [0, 0, 0, 1], False)]
)
def test_a_dilated_convolution_is_one(before: list[int], crops: list[int], is_one: bool) -> None:
    """One case is as the converter writes it; the other has padding on one side only."""
    writer = Writer()
    x = writer.input([1, 8, 7, 3], name="x")
    numbers = [
        writer.constant(np.array(values, "int32").reshape(2, -1).squeeze()) for values in ([2, 2], before, crops)
    ]
    apart = writer.add("SPACE_TO_BATCH_ND", [x, *numbers[:2]], "SpaceToBatchND", name="net/spread/SpaceToBatchND")
    generator = np.random.default_rng(0)
    weights = [generator.standard_normal(shape).astype("float32") for shape in ((4, 3, 3, 3), (4,))]
    options = {**SAME, "padding": 1, "fusedActivationFunction": 1}
    convolved = writer.add(
        "CONV_2D", [apart, *map(writer.constant, weights)], "Conv2D", options, name="net/spread/conv"
    )
    together = [convolved, numbers[0], numbers[2]]
    model = load_model(writer.file(writer.add("BATCH_TO_SPACE_ND", together, "BatchToSpaceND", name="net/spread/end")))
    script = model.module.script(show_meta=False)
    assert ("dilation=[2, 2]" in script, script.count("R.permute_dims(") == 2) == (is_one, is_one)
    image = generator.standard_normal((1, 8, 7, 3)).astype("float32")
    np.testing.assert_allclose(run(model, [image])[0], model.reference.outputs([image])[0], rtol=1e-4, atol=1e-5)
    assert first_differing_layer(model, model.reference, [image]) is None


def test_tensors_of_one_name_are_kept_apart() -> None:
    writer = Writer()
    x = writer.input([2, 3], name="x")
    doubled = writer.add("ADD", [x, x], "Add", name="same")
    product = writer.add("MUL", [doubled, x], "Mul", name="same")
    model = load_model(writer.file(writer.add("SUB", [product, doubled], "Sub", name="same")))
    values = np.float32([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_allclose(run(model, [values])[0], 2 * values * values - 2 * values)


def test_sizes_computed_while_it_runs_are_known_when_it_is_loaded() -> None:
    writer = Writer()
    x = writer.input([-1, 2, 3], name="x")
    shape = writer.add("SHAPE", [x], "Shape", {"outType": 2}, dtype="int32")
    ends = [writer.constant(np.array(values, "int32")) for values in ([0], [1], [1])]
    batch = writer.add("STRIDED_SLICE", [shape, *ends], "StridedSlice", {"shrinkAxisMask": 1}, dtype="int32")
    sizes = [batch, writer.constant(np.array(6, "int32"))]
    target_shape = writer.add("PACK", sizes, "Pack", {"valuesCount": 2}, dtype="int32")
    content = writer.file(writer.add("RESHAPE", [x, target_shape], "Reshape", name="flat"))
    model = load_model(content, batch=4)
    assert [spec.shape for spec in model.outputs] == [(4, 6)]
    assert model.layer_names == ("flat",)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"axis 0 of input 'serving_default_image'.*batch=1"):
        load_model(network())
    with pytest.raises(ModelImportError, match="there is no file"):
        load_model(tmp_path / "none.tflite")
    (tmp_path / "other.tflite").write_bytes(b"something else")
    with pytest.raises(ModelImportError, match=r"other\.tflite' is not a TFLite file"):
        load_model(tmp_path / "other.tflite")
    (tmp_path / "cut.tflite").write_bytes(network()[:200])
    with pytest.raises(ModelImportError, match=r"cut\.tflite'"):
        load_model(tmp_path / "cut.tflite", batch=1)


def test_what_cannot_be_imported_is_named_with_its_layer() -> None:
    writer = Writer()
    x = writer.input([2, 4], name="x")
    weights = writer.constant(np.ones((3, 4), "int8"), "w", scale=0.1)
    dense = writer.add("FULLY_CONNECTED", [x, weights], "FullyConnected", name="net/dense/MatMul")
    with pytest.raises(ModelImportError, match=r"FULLY_CONNECTED \(.*dynamic range.*\) in net/dense"):
        load_model(writer.file(dense))
    writer = Writer()
    shape = writer.constant(np.array([2, 3], "int32"))
    x = writer.input([2, 3], name="x")
    noise = writer.add("RANDOM_UNIFORM", [shape], "Random", {"seed": 1, "seed2": 2}, name="net/noise/uniform")
    with pytest.raises(ModelImportError, match=r"RANDOM_UNIFORM \(its result is random.*\) in net/noise"):
        load_model(writer.file(writer.add("ADD", [x, noise], "Add", name="net/sum/add")))


@pytest.mark.parametrize(
    ("kind", "table", "reason"),
    [
        ("IF", "If", "it chooses what to compute while it runs"),
        ("WHILE", "While", r"it loops while it runs; .*unroll=True"),
        ("READ_VARIABLE", "ReadVariable", "it keeps a state from one input to the next"),
        ("CALL_ONCE", "CallOnce", "it keeps a state from one input to the next"),
    ],
)
def test_what_is_no_straight_line_is_refused_before_it_runs(kind: str, table: str, reason: str) -> None:
    writer = Writer()
    x = writer.input([2, 4], name="x")
    result = writer.add(kind, [x], table, name="net/part/made")
    with pytest.raises(ModelImportError, match=rf"{kind} \({reason}.*\) in net/part"):
        load_model(writer.file(result))


def test_a_batch_that_litert_cannot_count_is_its_error() -> None:
    with pytest.raises(ModelImportError, match=r"LiteRT does not take this file with inputs of \[\[2147483647"):
        load_model(network(), batch=2**31 - 1)


def unnamed() -> Writer:
    writer = Writer()
    x = writer.input([2, 6, 6, 3])
    generator = np.random.default_rng(0)
    for channels in (3, 4):
        weight = writer.constant(generator.standard_normal((4, 3, 3, channels)).astype("float32"))
        bias = writer.constant(generator.standard_normal(4).astype("float32"))
        x = writer.add("CONV_2D", [x, weight, bias], "Conv2D", {**SAME, "fusedActivationFunction": 1})
    writer.add("ADD", [x, x], "Add")
    return writer


def test_without_names_operators_are_layers_by_their_numbers(three_workers: tvm_split.Cluster) -> None:
    writer = unnamed()
    for tensor in writer.tensors:
        tensor.name = None
    model = load_model(writer.file(len(writer.tensors) - 1))
    assert model.layer_names == ("conv_2d_0", "conv_2d_1", "add_0")
    assert ([tensor.name for tensor in model.inputs], [tensor.name for tensor in model.outputs]) == (
        ["input_0"],
        ["output_0"],
    )
    x = image_of(model)
    (actual,) = run_split(model, [x], ("conv_2d_0", "conv_2d_1"), three_workers)
    (expected,) = model.reference.outputs([x])
    assert np.abs(actual - expected).max() < 1e-4 * np.ptp(expected)
    assert first_differing_layer(model, model.reference, [x]) is None


def test_names_that_are_no_text_are_escaped() -> None:
    writer = unnamed()
    for number, tensor in enumerate(writer.tensors):
        tensor.name = b"net/caf\xe9_%d/made" % number
    model = load_model(writer.file(len(writer.tensors) - 1))
    assert model.layer_names == (r"net/caf\xe9_3", r"net/caf\xe9_6", r"net/caf\xe9_7")
    assert [tensor.name for tensor in model.inputs] == ["net_caf_xe9_0_made"]
    x = image_of(model)
    np.testing.assert_allclose(run(model, [x])[0], model.reference.outputs([x])[0], rtol=1e-4, atol=1e-5)


def test_outputs_that_nothing_makes_are_named() -> None:
    writer = Writer()
    x = writer.input([2, 4], name="x")
    with pytest.raises(ModelImportError, match=r"has output 'lonely', which no operator makes"):
        load_model(writer.file(x, writer.tensor([2, 4], name="lonely")))
