from collections.abc import Callable

import pytest
from tvm import relax

from relay_passes.ir import bindings_of
from rpc_runtime.program.specs import TensorSpec
from tvm_split.frontends.building import Built, ModelBuilder
from tvm_split.frontends.names import UniqueNames, identifier
from tvm_split.frontends.operators import Operators, dtype_of

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
