from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.ir import bindings_of
from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends.building import Built, ModelBuilder
from tvm_split.frontends.names import UniqueNames, identifier
from tvm_split.frontends.operators import Operators, constant, dtype_of, numbers_of

op = relax.op


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("layer1.0.conv1", "layer1_0_conv1"), ("0", "layer_0"), ("relu@1", "relu_1"), ("/a/b/", "a_b"), ("if", "if_"),
        ("R", "R_"), ("", "value"), ("größe", "gr_e"), ("a::b c", "a_b_c"),
    ],
)  # fmt: skip
def test_identifiers_read_like_their_layer(layer: str, name: str) -> None:
    assert identifier(layer) == name
    assert name.isidentifier()


def test_names_are_counted() -> None:
    names = UniqueNames()
    assert [names.take(name) for name in ("a", "a", "a_1", "a", "b")] == ["a", "a_1", "a_1_1", "a_2", "b"]


def built(
    layers: Callable[[ModelBuilder, relax.Var], list[relax.Expr]], dtypes: tuple[str, ...] = ("float32",)
) -> Built:
    """A network of the outputs that ``layers`` emits, over inputs ``in.put`` of shape [2, 2]."""
    builder = ModelBuilder()
    with builder.main([TensorSpec("in.put", (2, 2), dtype) for dtype in dtypes]) as inputs:
        builder.outputs = layers(builder, *inputs)
    return builder.built({"input": inputs[0]})


def emit(builder: ModelBuilder, layer: str, value: relax.Expr) -> relax.Expr:
    builder.layer = layer
    return builder.emit(value)


def test_nested_calls_belong_to_the_call_around_them() -> None:
    def layers(builder: ModelBuilder, x: relax.Var) -> list[relax.Expr]:
        first = emit(builder, "block.add", op.add(op.nn.relu(x), x))
        return [first, emit(builder, "exp", op.exp(first))]

    network = built(layers)
    assert network.layers == {"block_add": "block.add", "block_add_1": "block.add", "exp": "exp"}
    assert [binding.var.name for binding in bindings_of(network.module["main"])] == list(network.layers)
    assert [spec.name for spec in network.inputs] == ["in_put"]


def test_a_nested_call_that_two_calls_share_is_bound_once() -> None:
    def layers(builder: ModelBuilder, x: relax.Var) -> list[relax.Expr]:
        halves = op.split(x, 2, 0)
        return [emit(builder, "sum", op.add(relax.TupleGetItem(halves, 0), relax.TupleGetItem(halves, 1)))]

    assert list(built(layers).layers) == ["sum", "sum_1", "sum_2", "sum_3"]


def test_unused_calls_are_removed() -> None:
    def layers(builder: ModelBuilder, x: relax.Var) -> list[relax.Expr]:
        emit(builder, "a", op.exp(x))
        return [emit(builder, "b", op.nn.relu(x))]

    assert built(layers).layers == {"b": "b"}


def test_tuples_are_resolved() -> None:
    def layers(builder: ModelBuilder, x: relax.Var) -> list[relax.Expr]:
        pair = emit(builder, "pair", relax.Tuple([x, op.nn.relu(x)]))
        halves = emit(builder, "split", op.split(builder.emit(relax.TupleGetItem(pair, 1)), 2, 0))
        return [builder.emit(relax.TupleGetItem(halves, 1))]

    assert list(built(layers).layers.values()) == ["pair", "split", "split"]


def test_a_shape_that_depends_on_values_is_refused() -> None:
    def layers(builder: ModelBuilder, x: relax.Var) -> list[relax.Expr]:
        size = tvm.tirx.Var("size", "int64")
        return [builder.match_cast(op.nonzero(x), relax.TensorType((2, size), "int64"))]

    with pytest.raises(ModelImportError, match="depends on the values"):
        built(layers)


def test_a_returned_constant_becomes_a_layer_and_an_input_only_without_other_layers() -> None:
    table = constant([1, 2], "float32")
    network = built(lambda builder, x: [emit(builder, "relu", op.nn.relu(x)), x, table])
    assert list(network.layers.values()) == ["relu", "output_2"]
    assert [field.name for field in network.module["main"].body.body.fields] == ["relu", "in_put", "output_2"]
    assert built(lambda builder, x: [x, x]).layers == {"output_0": "output_0", "output_1": "output_1"}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_numbers_take_the_dtype_of_the_last_tensor_beside_them(dtype: str) -> None:
    def layers(builder: ModelBuilder, value: relax.Var, condition: relax.Var) -> list[relax.Expr]:
        operators = Operators(builder)
        quotient = operators.divide(1, operators.nn.relu(value))
        return [operators.cast(operators.where(condition, 0.5, quotient), dtype)]

    bindings = list(bindings_of(built(layers, (dtype, "bool")).module["main"]))
    assert [(binding.value.op.name, [dtype_of(operand) for operand in binding.value.args]) for binding in bindings] == [
        ("relax.nn.relu", [dtype]),
        ("relax.divide", [dtype, dtype]),
        ("relax.where", ["bool", dtype, dtype]),
    ]


def test_numbers_of_constants_only() -> None:
    numbers = numbers_of(constant([1, 2], "int64"))
    assert numbers is not None
    np.testing.assert_array_equal(numbers, np.array([1, 2]))
    assert numbers_of(relax.Var("x", relax.TensorType((2,), "int64"))) is None
    assert numbers_of(None) is None
