"""What stands between a stage's tensors and the nearest convolutions."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I, relax as R

from relay_passes.partition import Computation
from relay_passes.stage_ends import has_convolution, receiving_end, sending_end

WEIGHT = relax.const(np.zeros((8, 8, 1, 1), np.float32))


@pytest.fixture
def stage() -> Computation:
    """Pool, convolution, convolution, a residual addition of what came in, and a classifier beside it."""
    image = relax.TensorType((1, 8, 4, 4), "float32")
    x, flag = relax.Var("x", image), relax.Var("flag", relax.TensorType((1,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("stage", [x, flag]):
        with builder.dataflow():
            pooled = builder.emit(relax.op.nn.max_pool2d(x, (3, 3), padding=(1, 1)), "pooled")
            first = builder.emit(relax.op.nn.conv2d(pooled, WEIGHT), "first")
            bent = builder.emit(relax.op.nn.relu(first), "bent")
            weight = builder.emit(relax.op.add(WEIGHT, relax.const(1.0)), "weight")
            second = builder.emit(relax.op.nn.conv2d(bent, weight), "second")
            residual = builder.emit(relax.op.add(second, x), "residual")
            flat = builder.emit(relax.op.reshape(second, (1, 128)), "flat")
            scores = builder.emit(relax.op.multiply(flat, flag), "scores")
            outputs = builder.emit_output(relax.Tuple([residual, scores]), "outputs")
        builder.emit_func_output(outputs)
    return Computation("stage", builder.get()["stage"], ("x", "flag"), ("residual", "scores"))


def test_the_end_begins_at_the_convolution(stage: Computation) -> None:
    @I.ir_module
    class Expected:
        @R.function
        def stage(x: R.Tensor((1, 8, 4, 4), "float32"), bent: R.Tensor((1, 8, 4, 4), "float32")) -> R.Tuple(
            R.Tensor((1, 8, 4, 4), "float32")
        ):
            with R.dataflow():
                weight = R.add(WEIGHT, R.const(1.0, "float32"))
                second = R.nn.conv2d(bent, weight)
                residual = R.add(second, x)
                outputs = (residual,)
                R.output(outputs)
            return outputs

    found = sending_end(stage, {"residual"})
    assert_structural_equal(found.function, Expected["stage"], map_free_vars=True)
    assert (found.received, found.sent) == (("x", "bent"), ("residual",))


def test_the_beginning_ends_at_the_convolution(stage: Computation) -> None:
    """With what else is needed there: the second convolution's result, which is added."""

    @I.ir_module
    class Expected:
        @R.function
        def stage(x: R.Tensor((1, 8, 4, 4), "float32"), bent: R.Tensor((1, 8, 4, 4), "float32")) -> R.Tuple(
            R.Tensor((1, 8, 4, 4), "float32"), R.Tensor((1, 8, 4, 4), "float32")
        ):
            with R.dataflow():
                pooled = R.nn.max_pool2d(x, pool_size=[3, 3], padding=[1, 1, 1, 1])
                first = R.nn.conv2d(pooled, WEIGHT)
                weight = R.add(WEIGHT, R.const(1.0, "float32"))
                second = R.nn.conv2d(bent, weight)
                residual = R.add(second, x)
                outputs = (first, residual)
                R.output(outputs)
            return outputs

    found = receiving_end(stage, {"x"})
    assert_structural_equal(found.function, Expected["stage"], map_free_vars=True)
    assert (found.received, found.sent) == (("x", "bent"), ("first", "residual"))


def test_a_beginning_goes_through_tuples() -> None:
    x = relax.Var("x", relax.TensorType((1, 8, 4, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("stage", [x]):
        with builder.dataflow():
            halves = builder.emit(relax.op.split(x, 2, axis=1), "halves")
            left = builder.emit(relax.TupleGetItem(halves, 0), "left")
            right = builder.emit(relax.TupleGetItem(halves, 1), "right")
            total = builder.emit(relax.op.add(left, right), "total")
            outputs = builder.emit_output(relax.Tuple([total]), "outputs")
        builder.emit_func_output(outputs)
    made = Computation("stage", builder.get()["stage"], ("x",), ("total",))
    found = receiving_end(made, {"x"})
    assert_structural_equal(found.function, made.function, map_free_vars=True)
    assert not has_convolution(found)


def test_what_is_passed_on_needs_nothing(stage: Computation) -> None:
    assert receiving_end(stage, set()).received == ()
    assert receiving_end(stage, {"flag"}).received == ("flag", "bent")
    assert has_convolution(receiving_end(stage, {"x"}))
