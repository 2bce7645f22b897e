from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.fold_constants import FoldConstants
from tests.helpers.placements import run
from tests.helpers.relax_graphs import module_of

A = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3)).astype("float32")
B = np.random.default_rng(1).uniform(0.5, 2.0, (3,)).astype("float32")


def added(build) -> tvm.IRModule:
    """A function that adds what ``build`` makes of two constants to its input."""
    x = relax.Var("x", relax.TensorType((1,), "float32"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        folded = builder.emit(build(relax.const(A), relax.const(B)))
        return [builder.emit(relax.op.add(x, folded))]

    return module_of([x], emit)


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
    "take": lambda a, b: relax.op.take(a, relax.const(np.array([[1, 0, 1]])), 0),
    "take of all": lambda a, b: relax.op.take(relax.op.reshape(a, [6]), relax.const(np.array(5))),
    "cast": lambda a, b: relax.op.astype(relax.op.astype(a, "float16"), "float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_constants_become_what_the_compiler_computes(name: str) -> None:
    before = relax.transform.Normalize()(added(CASES[name]))
    after = FoldConstants()(before)
    assert after.script().count("R.call") == 0
    operators = [binding.value.op.name for binding in after["main"].body.blocks[0].bindings[:-1]]
    assert operators == ["relax.add"]
    x = np.zeros(1, "float32")
    np.testing.assert_allclose(run(after, x)[0], run(before, x)[0], rtol=1e-6)


def test_a_constant_result_stays_a_variable() -> None:
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    table = relax.op.sqrt(relax.const(B))
    after = FoldConstants()(module_of([x], lambda builder: [builder.emit(table, "table"), x]))
    assert all(isinstance(field, relax.Var) for field in after["main"].body.blocks[0].bindings[-1].value.fields)
    np.testing.assert_allclose(run(after, np.zeros(3, "float32"))[0], np.sqrt(B), rtol=1e-6)
