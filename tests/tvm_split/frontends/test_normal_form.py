from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.normal_form import UniqueNames, identifier, normal_form


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


def function(body: object) -> relax.Function:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 2), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = body(builder, x)  # type: ignore[operator]
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()["main"]


def values_of(form: object) -> list[str]:
    module = form.module  # type: ignore[attr-defined]
    return [binding.var.name for block in module["main"].body.blocks for binding in block.bindings]


def test_nested_calls_belong_to_the_call_around_them() -> None:
    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = builder.emit(relax.op.add(relax.op.nn.relu(x), x), "kept")
        return relax.Tuple([first, builder.emit(relax.op.exp(first), "last")])

    form = normal_form(function(body), {"kept": "block.add", "last": "exp"}, ["in.put"])
    assert form.layers == {"block_add": "block.add", "block_add_1": "block.add", "exp": "exp"}
    assert values_of(form) == list(form.layers)
    assert form.renamed["kept"] == "block_add_1"
    assert form.module["main"].params[0].name == "in_put"


def test_what_nobody_uses_goes() -> None:
    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        builder.emit(relax.op.exp(x), "unused")
        return builder.emit(relax.op.nn.relu(x), "used")

    form = normal_form(function(body), {"unused": "a", "used": "b"}, ["x"])
    assert form.layers == {"b": "b"}
    assert "unused" not in form.renamed


def test_tuples_are_taken_apart() -> None:
    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        pair = builder.emit(relax.Tuple([x, relax.op.nn.relu(x)]), "pair")
        halves = builder.emit(relax.op.split(builder.emit(relax.TupleGetItem(pair, 1), "item"), 2, 0), "halves")
        return builder.emit(relax.TupleGetItem(halves, 1), "half")

    form = normal_form(function(body), {"pair": "pair", "item": "item", "halves": "split", "half": "split"}, ["x"])
    assert list(form.layers.values()) == ["pair", "split", "split"]
    assert isinstance(form.module["main"].body.body, relax.Tuple)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        import tvm

        size = tvm.tirx.Var("size", "int64")
        places = builder.emit(relax.op.nonzero(x), "places")
        known = builder.match_cast(places, relax.TensorType((2, size), "int64"))
        return builder.emit(relax.op.negative(known), "negative")

    with pytest.raises(ModelImportError, match="depends on the values"):
        normal_form(function(body), {"places": "where", "negative": "where"}, ["x"])


def test_a_constant_that_is_returned_becomes_a_layer() -> None:
    constant = relax.const(np.float32([1, 2]), "float32")
    form = normal_form(
        function(lambda builder, x: relax.Tuple([relax.op.nn.relu(x), x, constant])), {"gv": "relu"}, ["x"]
    )
    assert list(form.layers.values()) == ["relu", "output_2"]
    assert [field.name for field in form.module["main"].body.body.fields] == ["relu", "x", "output_2"]


def test_inputs_become_layers_where_there_is_no_other() -> None:
    form = normal_form(function(lambda builder, x: relax.Tuple([x, x])), {}, ["x"])
    assert form.layers == {"output_0": "output_0", "output_1": "output_1"}
