"""Stages with other layouts at their ends compute the same; and the ends of a stage, up to its nearest convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I, relax as R, tirx as T
from tvm.tirx import IndexMap

from relay_passes.boundary_layouts import (
    Layout,
    changed_parameters,
    count_changes,
    has_convolution,
    layouts_made,
    receiving_end,
    sending_end,
    with_layouts,
)
from relay_passes.ir import names_of, new_function
from relay_passes.partition import Computation
from tests.helpers.placements import run

WEIGHT = relax.const(np.zeros((8, 8, 1, 1), np.float32))
BLOCKED = Layout((1, 2, 4, 4, 8), IndexMap.from_func(lambda n, c, h, w: (n, c // 8, h, w, c % 8)))


@I.ir_module
class Plain:
    @R.function
    def main(x: R.Tensor((1, 16, 4, 4), "float32"), y: R.Tensor((1, 16, 4, 4), "float32")) -> R.Tuple(
        R.Tensor((1, 16, 4, 4), "float32"), R.Tensor((1, 16, 4, 4), "float32")
    ):
        with R.dataflow():
            total = R.add(x, y)
            positive = R.nn.relu(total)
            outputs = (total, positive)
            R.output(outputs)
        return outputs


@I.ir_module
class Blocked:
    @R.function
    def main(x: R.Tensor((1, 2, 4, 4, 8), "float32"), y: R.Tensor((1, 16, 4, 4), "float32")) -> R.Tuple(
        R.Tensor((1, 16, 4, 4), "float32"), R.Tensor((1, 2, 4, 4, 8), "float32")
    ):
        with R.dataflow():
            x_plain = R.layout_transform(x, index_map=T.index_map(lambda n, c, h, w, i: (n, c * 8 + i, h, w)))
            total = R.add(x_plain, y)
            positive = R.nn.relu(total)
            sent = R.layout_transform(positive, index_map=T.index_map(lambda n, c, h, w: (n, c // 8, h, w, c % 8)))
            outputs = (total, sent)
            R.output(outputs)
        return outputs


@I.ir_module
class Unblocked:
    @R.function
    def main(
        x: R.Tensor((1, 2, 4, 4, 8), "float32"),
    ) -> R.Tuple(R.Tensor((1, 16, 4, 4), "float32"), R.Tensor((1, 2, 4, 4, 8), "float32")):
        with R.dataflow():
            plain = R.layout_transform(x, index_map=T.index_map(lambda n, c, h, w, i: (n, c * 8 + i, h, w)))
            outputs = (plain, x)
            R.output(outputs)
        return outputs


def part() -> Computation:
    return Computation("stage_0", Plain["main"], ("x", "y"), ("total", "positive"))


def test_the_changes_are_said_inside() -> None:
    changed = with_layouts(part(), {"x": BLOCKED, "positive": BLOCKED, "elsewhere": BLOCKED})
    expected = Blocked["main"].with_attr("global_symbol", "stage_0")
    assert_structural_equal(changed.function, expected, map_free_vars=True)
    assert (changed.received, changed.sent) == (("x", "y"), ("total", "positive"))


def test_the_values_are_the_same() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 1, 16, 4, 4)).astype(np.float32)

    def blocked(array: np.ndarray) -> np.ndarray:
        return array.reshape(1, 2, 8, 4, 4).transpose(0, 1, 3, 4, 2)

    function = with_layouts(part(), {"x": BLOCKED, "positive": BLOCKED}).function.with_attr("global_symbol", "main")
    total, positive = run(tvm.IRModule({"main": function}), np.ascontiguousarray(blocked(x)), y)
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_array_equal(positive, blocked(np.maximum(x + y, 0)))


def test_other_forms_take_no_name_that_is_taken() -> None:
    """A variable that passes could take for another, since they go by names, would give wrong results."""
    image = relax.TensorType((1, 16, 4, 4), "float32")
    x, x_plain = relax.Var("x", image), relax.Var("x_plain", image)
    subtracted = new_function(
        "stage", [x, x_plain], lambda builder: [builder.emit(relax.op.subtract(x, x_plain), "y_sent")]
    )
    computation = Computation("stage", subtracted, ("x", "x_plain"), ("y",))
    function = with_layouts(computation, {"x": BLOCKED, "y": BLOCKED}).function
    assert names_of(function) == ["x", "x_plain", "x_plain_2", "y_sent", "y_sent_2", "outputs"]


def test_layouts_are_read_off_both_ends() -> None:
    assert changed_parameters(Blocked["main"]) == [True, False]
    assert changed_parameters(Plain["main"]) == [False, False]
    assert [count_changes(module["main"]) for module in (Plain, Blocked, Unblocked)] == [0, 2, 1]
    layout, as_it_came = layouts_made(Unblocked["main"])
    assert BLOCKED.is_same(layout)
    assert as_it_came is None
    assert not BLOCKED.is_same(None)
    assert not BLOCKED.is_same(Layout(BLOCKED.shape, IndexMap.from_func(lambda n, c, h, w: (n, c % 2, h, w, c // 2))))


@pytest.fixture
def stage() -> Computation:
    """Pool, convolution, convolution, a residual addition of what came in, and a classifier beside it."""
    image = relax.TensorType((1, 8, 4, 4), "float32")
    x, flag = relax.Var("x", image), relax.Var("flag", relax.TensorType((1,), "float32"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        pooled = builder.emit(relax.op.nn.max_pool2d(x, (3, 3), padding=(1, 1)), "pooled")
        first = builder.emit(relax.op.nn.conv2d(pooled, WEIGHT), "first")
        bent = builder.emit(relax.op.nn.relu(first), "bent")
        weight = builder.emit(relax.op.add(WEIGHT, relax.const(1.0)), "weight")
        second = builder.emit(relax.op.nn.conv2d(bent, weight), "second")
        residual = builder.emit(relax.op.add(second, x), "residual")
        flat = builder.emit(relax.op.reshape(second, (1, 128)), "flat")
        return [residual, builder.emit(relax.op.multiply(flat, flag), "scores")]

    return Computation("stage", new_function("stage", [x, flag], emit), ("x", "flag"), ("residual", "scores"))


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

    end = sending_end(stage, {"residual"})
    assert_structural_equal(end.function, Expected["stage"], map_free_vars=True)
    assert (end.received, end.sent) == (("x", "bent"), ("residual",))


def test_the_beginning_ends_at_the_convolution(stage: Computation) -> None:
    """The receiving end also needs the second convolution's result, which is added."""

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

    beginning = receiving_end(stage, {"x"})
    assert_structural_equal(beginning.function, Expected["stage"], map_free_vars=True)
    assert (beginning.received, beginning.sent) == (("x", "bent"), ("first", "residual"))


def test_a_beginning_goes_through_tuples() -> None:
    x = relax.Var("x", relax.TensorType((1, 8, 4, 4), "float32"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        halves = builder.emit(relax.op.split(x, 2, axis=1), "halves")
        left = builder.emit(relax.TupleGetItem(halves, 0), "left")
        right = builder.emit(relax.TupleGetItem(halves, 1), "right")
        return [builder.emit(relax.op.add(left, right), "total")]

    computation = Computation("stage", new_function("stage", [x], emit), ("x",), ("total",))
    beginning = receiving_end(computation, {"x"})
    assert_structural_equal(beginning.function, computation.function, map_free_vars=True)
    assert not has_convolution(beginning)


def test_what_is_passed_on_needs_nothing(stage: Computation) -> None:
    assert receiving_end(stage, set()).received == ()
    assert receiving_end(stage, {"flag"}).received == ("flag", "bent")
    assert has_convolution(receiving_end(stage, {"x"}))
