"""Half precision as a choice of a plan: what it does to values is told, and plans, bundles and weights have it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tvm_split
from tests.models.small_onnx_model import INPUT_SHAPE, small_model
from tvm_split.compiler.bundle import Verified
from tvm_split.compiler.precision import in_precision
from tvm_split.errors import PlanError
from tvm_split.placement.plan import Plan

SPLIT = {"machine-a": ["conv_1", "relu_1"], "machine-b": ["conv_2"]}
LARGEST_ERROR = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tvm_split.Model:
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(small_model(), path)
    return tvm_split.load_model(path)


def weight_bytes(bundle: tvm_split.Bundle) -> int:
    return sum(weight.blob.size_bytes for stage in bundle.program.stages for weight in stage.weights)


@pytest.mark.parametrize("precision", LARGEST_ERROR)
def test_a_plan_says_the_precision_and_a_bundle_its_error(
    model: tvm_split.Model, tmp_path: Path, precision: str
) -> None:
    cluster = tvm_split.Cluster.in_process(2, threads=1)
    plan = tvm_split.plan(model, cluster, split=SPLIT, precision=precision)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.precision == precision
    bundle = tvm_split.compile(model, plan)
    assert bundle.output_error is not None
    assert LARGEST_ERROR["float32"] * (precision != "float32") < bundle.output_error < LARGEST_ERROR[precision]
    bundle.save(tmp_path / "bundle")
    loaded = tvm_split.Bundle.load(tmp_path / "bundle")
    assert (loaded.output_error, loaded.plan.precision) == (bundle.output_error, precision)
    x = np.random.default_rng(1).standard_normal(INPUT_SHAPE).astype(np.float32)
    with tvm_split.deploy(loaded, cluster) as deployment:
        (actual,) = deployment.run(x)
    assert model.reference is not None
    (expected,) = model.reference.outputs([x])
    assert np.abs(actual - expected).max() < LARGEST_ERROR[precision] * np.abs(expected).max()


def test_weights_of_halves_are_half_as_large(model: tvm_split.Model) -> None:
    cluster = tvm_split.Cluster.in_process(1, threads=1)
    whole, half = (
        tvm_split.compile(model, tvm_split.plan(model, cluster, precision=precision), verify=False)
        for precision in ("float32", "float16")
    )
    assert weight_bytes(half) < 0.7 * weight_bytes(whole)


def test_layers_keep_their_names(model: tvm_split.Model) -> None:
    half = in_precision(model, "float16")
    assert half.layer_names == model.layer_names
    assert in_precision(half, "float16").layers == half.layers
    assert in_precision(model, "float32") is model


def einsum_model() -> onnx.ModelProto:
    """Words of a table, times a matrix by an Einsum and another one by a MatMul."""
    generator = np.random.default_rng(0)
    tables = {"table": (11, 8), "matrix": (8, 6), "last": (6, 4)}
    constants = [
        numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32), name)
        for name, shape in tables.items()
    ]
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["found"], name="look_up"),
        helper.make_node("Einsum", ["found", "matrix"], ["mixed"], name="mix", equation="bij,jk->bik"),
        helper.make_node("MatMul", ["mixed", "last"], ["scores"], name="score"),
    ]
    words = helper.make_tensor_value_info("words", onnx.TensorProto.INT64, [2, 5])
    scores = helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [2, 5, 4])
    network = helper.make_graph(nodes, "words", [words], [scores], constants)
    return helper.make_model(network, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_what_stays_in_float32_is_said_in_the_plan(tmp_path: Path) -> None:
    model = tvm_split.load_model(einsum_model())
    cluster = tvm_split.Cluster.in_process(1, threads=1)
    plan = tvm_split.plan(model, cluster, precision="bfloat16")
    (remark,) = plan.remarks
    assert remark.startswith("mix (einsum): multiplied in float32, not in bfloat16")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").remarks == plan.remarks
    assert tvm_split.plan(model, cluster).remarks == ()


def test_models_of_integers_have_an_error_without_examples() -> None:
    """The first words of a table are in every table."""
    model = tvm_split.load_model(einsum_model())
    assert model.example_inputs is None
    bundle = tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.in_process(1), precision="float16"))
    assert bundle.verified is Verified.AS_COMPILED
    assert bundle.output_error is not None
    assert 1e-5 < bundle.output_error < LARGEST_ERROR["float16"]


def test_integers_that_the_source_does_not_take_are_not_compared() -> None:
    proto = einsum_model()
    del proto.graph.initializer[0]  # a table of one word, in which there is no second one
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 8), np.float32), "table"))
    model = tvm_split.load_model(proto)
    bundle = tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.in_process(1)))
    assert (bundle.verified, bundle.output_error) == (Verified.NO, None)


def test_layers_that_are_shared_stay_as_they_are(model: tvm_split.Model) -> None:
    shard = tvm_split.Shard("conv_1", "conv_2", "rows", {"machine-a": 0.5, "machine-b": 0.5})
    with pytest.raises(PlanError, match=r"shards, precision.*stay in float32"):
        tvm_split.plan(model, tvm_split.Cluster.local(2), shards=[shard], precision="float16")


def test_other_words_are_refused(model: tvm_split.Model, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"precision is 'int8'.*'float32', 'float16' or 'bfloat16'"):
        tvm_split.plan(model, tvm_split.Cluster.in_process(1), precision="int8")
    tvm_split.plan(model, tvm_split.Cluster.in_process(1), precision="float16").save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"float16"', '"float8"'))
    with pytest.raises(PlanError, match="precision"):
        Plan.load(tmp_path / "plan.json")
