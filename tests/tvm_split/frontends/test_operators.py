from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tvm_split.frontends.importing import RecordingBuilder
from tvm_split.frontends.operators import Operators, constant, dtype_of, numbers_of


def bound(*dtypes: str) -> list[tuple[str, list[str]]]:
    """Names and dtypes of arguments, of what some operators bind over variables of these dtypes."""
    builder = RecordingBuilder()
    parameters = [relax.Var(f"x{place}", relax.TensorType((2,), dtype)) for place, dtype in enumerate(dtypes)]
    with builder.function("main", parameters):
        with builder.dataflow():
            op = Operators(builder)
            builder.layer = "layer"
            value, condition = parameters
            quotient = op.divide(1, op.nn.relu(value))
            result = op.cast(op.where(condition, 0.5, quotient), dtypes[0])
            builder.emit_output(result)
        builder.emit_func_output(result)
    assert set(builder.layers.values()) == {"layer"}
    calls = [binding.value for block in builder.get()["main"].body.blocks for binding in block.bindings]
    return [(call.op.name, [dtype_of(each) for each in call.args]) for call in calls if isinstance(call, relax.Call)]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_numbers_take_the_dtype_of_the_last_tensor_beside_them(dtype: str) -> None:
    assert bound(dtype, "bool") == [
        ("relax.nn.relu", [dtype]),
        ("relax.divide", [dtype, dtype]),
        ("relax.where", ["bool", dtype, dtype]),
    ]


def test_numbers_of_constants_only() -> None:
    found = numbers_of(constant([1, 2], "int64"))
    assert found is not None
    np.testing.assert_array_equal(found, np.array([1, 2]))
    assert numbers_of(relax.Var("x", relax.TensorType((2,), "int64"))) is None
    assert numbers_of(None) is None
