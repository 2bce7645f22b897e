from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.fold_constants import FoldConstants
from tests.helpers.placements import run

A = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3)).astype("float32")
B = np.random.default_rng(1).uniform(0.5, 2.0, (3,)).astype("float32")


def module_of(build) -> tvm.IRModule:
    """A function that adds what ``build`` makes of two constants to its input."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            folded = builder.emit(build(relax.const(A), relax.const(B)))
            result = builder.emit_output(relax.Tuple([builder.emit(relax.op.add(x, folded))]))
        builder.emit_func_output(result)
    return builder.get()


CASES = {
    "add": lambda a, b: relax.op.add(a, b),
    "subtract": lambda a, b: relax.op.subtract(a, b),
    "divide": lambda a, b: relax.op.divide(b, a),
    "multiply": lambda a, b: relax.op.multiply(a, b),
    "sqrt": lambda a, b: relax.op.sqrt(a),
    "rsqrt": lambda a, b: relax.op.rsqrt(a),
    "reshape": lambda a, b: relax.op.reshape(a, (3, 2)),
    "permute": lambda a, b: relax.op.permute_dims(a, [1, 0]),
    "expand": lambda a, b: relax.op.expand_dims(b, [0, 2]),
    "broadcast": lambda a, b: relax.op.broadcast_to(b, (4, 3)),
    "cast": lambda a, b: relax.op.astype(relax.op.astype(a, "float16"), "float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_constants_become_what_the_compiler_computes(name: str) -> None:
    before = relax.transform.Normalize()(module_of(CASES[name]))
    after = FoldConstants()(before)
    assert after.script().count("R.call") == 0
    operators = [binding.value.op.name for binding in after["main"].body.blocks[0].bindings[:-1]]
    assert operators == ["relax.add"]
    x = np.zeros(1, "float32")
    np.testing.assert_allclose(run(after, x)[0], run(before, x)[0], rtol=1e-6)


def test_a_constant_result_stays_a_variable() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            table = builder.emit(relax.op.sqrt(relax.const(B)), name_hint="table")
            result = builder.emit_output(relax.Tuple([table, x]))
        builder.emit_func_output(result)
    after = FoldConstants()(builder.get())
    assert all(isinstance(field, relax.Var) for field in after["main"].body.blocks[0].bindings[-1].value.fields)
    np.testing.assert_allclose(run(after, np.zeros(3, "float32"))[0], np.sqrt(B), rtol=1e-6)
