from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, quantize_static

import tvm_split
from tests.helpers.frontends.comparison import assert_close, assert_equal_to_source, run
from tests.helpers.frontends.contract import assert_keeps_contract
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.frontends.building import QUANTIZED_TOLERANCE

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))
LIGHT_IN_SHORT = ("light_resnet50", "light_shufflenet", "light_squeezenet")


def proto(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: list[str],
    weights: dict[str, Any] | None = None,
    element: int = TensorProto.FLOAT,
    opset: int = 17,
) -> Any:
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info(name, element, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, element, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def conv_net(batch: Any = 1) -> Any:
    weights = {"w": np.ones((3, 3, 1, 1), np.float32), "b": np.float32([1, 2, 3])}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="/stem/conv"),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "w"], ["d"]),
        helper.make_node("Add", ["d", "r"], ["s"], name="twice"),
        helper.make_node("Relu", ["s"], ["y"], name="twice"),
    ]
    return proto(nodes, {"x": [batch, 3, 4, 4]}, ["y", "r"], weights)


def test_layers_are_nodes_and_nameless_ones_are_counted() -> None:
    model = load_model(conv_net())
    assert_keeps_contract(model)
    assert model.layer_names == ("/stem/conv", "Relu_1", "Conv_2", "Add_3", "Relu_4")
    assert model.layers["stem_conv"] == "/stem/conv"
    assert model.framework == "onnx"
    assert model.example_inputs is None
    assert_equal_to_source(model, [np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype("float32")])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem in LIGHT_IN_SHORT else pytest.mark.slow) for path in LIGHT],
)
def test_the_light_models_load_with_names(path: Path) -> None:
    model = load_model(path)
    assert_keeps_contract(model)
    assert model.name == path.stem
    names = [node.name for node in onnx.load(str(path)).graph.node if node.op_type in ("Conv", "Gemm", "Softmax")]
    assert len(names) > 5
    if all(names):
        assert set(names) <= set(model.layer_names)


def test_reference_values_are_those_of_the_nodes() -> None:
    model = load_model(conv_net())
    inputs = [np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype("float32")]
    assert model.reference is not None
    values = dict(model.reference.values(inputs))
    assert set(values) <= set(model.layers)
    assert [model.layers[name] for name in values] == list(model.layer_names)
    assert_close(next(reversed(values.values())), model.reference.outputs(inputs)[0])
    assert_close(values["Relu_1"], model.reference.outputs(inputs)[1])


@pytest.mark.parametrize("form", ["path", "bytes"])
def test_forms_of_a_model(form: str, tmp_path: Path) -> None:
    path = tmp_path / "my net.onnx"
    onnx.save(conv_net(), str(path))
    model = load_model(path if form == "path" else path.read_bytes())
    assert model.name == ("my_net" if form == "path" else "graph")
    assert_keeps_contract(model)


def test_weights_in_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    options = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(conv_net(), str(path), **options)
    x = np.ones((1, 3, 4, 4), np.float32)
    np.testing.assert_array_equal(run(load_model(path), [x])[0], run(load_model(conv_net()), [x])[0])
    with pytest.raises(ModelImportError, match=r"'w'.*another file"):
        load_model(path.read_bytes())
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelImportError, match=r"model\.onnx"):
        load_model(path)


def test_open_sizes() -> None:
    assert load_model(conv_net("N"), batch=3).inputs[0].shape == (3, 3, 4, 4)
    assert load_model(conv_net("N"), dimensions={"N": 2}).outputs[0].shape == (2, 3, 4, 4)
    assert load_model(conv_net(None), dimensions={"x[0]": 2}).outputs[0].shape == (2, 3, 4, 4)
    assert load_model(conv_net(None), np.zeros((5, 3, 4, 4), np.float32)).outputs[0].shape == (5, 3, 4, 4)
    with pytest.raises(ModelImportError, match=r"axis 0 of input 'x'.*'N'.*batch="):
        load_model(conv_net("N"))
    with pytest.raises(ModelImportError, match=r"batch is 3.*2|2.*batch is 3|batch.*3.*2"):
        load_model(conv_net("N"), batch=3, dimensions={"N": 2})
    with pytest.raises(ModelImportError, match=r"batch gives x\[0\] the size 3.*fixed size 1"):
        load_model(conv_net(), batch=3)
    with pytest.raises(ModelImportError, match=r"'M'.*'N'"):
        load_model(conv_net("N"), batch=3, dimensions={"M": 2})


def test_one_name_for_two_sizes() -> None:
    nodes = [helper.make_node("Concat", ["x", "z"], ["y"], axis=0)]
    model = load_model(proto(nodes, {"x": ["N", 2], "z": ["N", 2]}, ["y"]), batch=3)
    assert model.outputs[0].shape == (6, 2)
    with pytest.raises(ModelImportError, match=r"3.*2|2.*3"):
        load_model(proto(nodes, {"x": ["N", 2], "z": ["N", 2]}, ["y"]), [np.zeros((2, 2), "f"), np.zeros((3, 2), "f")])


def test_shapes_computed_from_an_open_size_are_folded() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="shape"),
        helper.make_node("Gather", ["shape", "zero"], ["rows"], name="gather"),
        helper.make_node("Unsqueeze", ["rows", "axis"], ["rows1"], name="unsqueeze"),
        helper.make_node("Concat", ["rows1", "rest"], ["target"], name="concat", axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"], name="reshape"),
    ]
    weights = {"zero": np.int64(0), "axis": np.int64([0]), "rest": np.int64([-1])}
    model = load_model(proto(nodes, {"x": ["N", 3, 4]}, ["y"], weights), batch=2)
    assert model.layer_names == ("reshape",)
    assert model.outputs[0].shape == (2, 12)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ((np.zeros((1, 3, 4, 4), "f"),) * 2, "inputs are x, .*has 2"),
        (np.zeros((1, 3, 4, 4)), "float32.*float64"),
        (np.zeros((1, 3, 4, 5), "f"), r"3, 4, 4\].*3, 4, 5\]"),
        (np.zeros((3, 4, 4), "f"), r"1, 3, 4, 4\].*\[3, 4, 4\]"),
        ({"y": np.zeros((1, 3, 4, 4), "f")}, r"\['x'\].*\['y'\]"),
    ],
)
def test_example_inputs_that_do_not_fit(examples: Any, message: str) -> None:
    with pytest.raises(ModelImportError, match=message):
        load_model(conv_net(), examples)


def test_operators_that_cannot_be_imported_are_all_named() -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"], name="noise"),
        helper.make_node("Det", ["r"], ["d"], name="determinant"),
        helper.make_node("Thing", ["d"], ["y"], name="custom", domain="my.domain"),
    ]
    model = proto(nodes, {"x": [2, 2]}, ["y"])
    model.opset_import.append(helper.make_opsetid("my.domain", 1))
    with pytest.raises(
        ModelImportError, match=r"(?s)RandomNormalLike.*random.*noise.*Det.*determinant.*my\.domain\.Thing"
    ):
        load_model(model)


def test_branches_and_dynamic_shapes_are_refused() -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["out"])], "branch", [], [helper.make_tensor_value_info("out", 1, None)]
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=branch),
    ]
    with pytest.raises(ModelImportError, match=r"If.*chooses.*choice"):
        load_model(proto(nodes, {"x": [2]}, ["y"]))
    with pytest.raises(ModelImportError, match=r"NonZero.*depends on the values.*where"):
        load_model(proto([helper.make_node("NonZero", ["x"], ["y"], name="where")], {"x": [2]}, ["y"]))


def test_an_input_as_output_and_an_output_twice() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Identity", ["x"], ["z"])]
    model = load_model(proto(nodes, {"x": [2]}, ["y", "z"]))
    assert_keeps_contract(model)
    assert_equal_to_source(model, [np.float32([-1, 1])])


def test_an_input_and_a_weight_as_outputs_themselves() -> None:
    weights = {"table": np.float32([1, 2, 3]), "scalar": np.float32(4)}
    model = load_model(
        proto([helper.make_node("Relu", ["x"], ["y"])], {"x": [2]}, ["table", "x", "y", "scalar"], weights)
    )
    assert model.layer_names == ("Relu_0", "output_0", "output_3")
    assert_keeps_contract(model)
    assert_equal_to_source(model, [np.float32([-1, 1])])


def test_no_node_at_all() -> None:
    model = load_model(proto([], {"x": [2]}, ["x"]))
    assert model.layer_names == ("output_0",)
    assert_equal_to_source(model, [np.float32([-1, 1])])


class Samples(CalibrationDataReader):
    """Random images, from which the ranges of values are taken."""

    def __init__(self, count: int = 3) -> None:
        generator = np.random.default_rng(0)
        self.samples = iter([{"x": generator.standard_normal((1, 3, 8, 8)).astype("float32")} for _ in range(count)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("opset", [13, 17])
def test_files_quantised_by_onnxruntime(opset: int, per_channel: bool, tmp_path: Path) -> None:
    """Below opset 19, ONNX's own evaluator has no DequantizeLinear, by which weights are stored as integers."""
    generator = np.random.default_rng(1)
    weights = {
        "w": generator.standard_normal((4, 3, 3, 3)).astype("float32"),
        "b": generator.standard_normal(4).astype("float32"),
        "v": generator.standard_normal((36, 5)).astype("float32"),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "v"], ["y"], name="head"),
    ]
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(proto(nodes, {"x": [1, 3, 8, 8]}, ["y"], weights, opset=opset), before)
    options = {"WeightSymmetric": True, "ActivationSymmetric": False}
    quantize_static(before, after, Samples(), per_channel=per_channel, extra_options=options)
    (sample,) = (Samples(1).get_next() or {}).values()
    model = load_model(after, sample)
    assert {"conv", "pool", "head"} <= set(model.layer_names)
    assert model.tolerance == QUANTIZED_TOLERANCE
    assert not any("w_" in layer for layer in model.layer_names)  # weights are constants
    with tvm_split.compile_and_deploy(model, None, tvm_split.Cluster.in_process()) as deployment:  # verifies
        assert_close(deployment.run(sample)[0], model.reference.outputs([sample])[0], model.tolerance)
