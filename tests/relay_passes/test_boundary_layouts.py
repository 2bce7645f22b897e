"""Stages with other layouts at their ends compute the same."""

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I, relax as R, tirx as T
from tvm.tirx import IndexMap

from relay_passes.boundary_layouts import (
    Layout,
    changed_parameters,
    count_changes,
    layouts_made,
    with_layouts,
)
from relay_passes.ir import names_of, new_function
from relay_passes.partition import Computation
from tests.helpers.placements import run

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


def blocked_part() -> Computation:
    plain = Computation("main", Plain["main"], ("x", "y"), ("total", "positive"))
    return with_layouts(plain, {"x": BLOCKED, "positive": BLOCKED, "elsewhere": BLOCKED})


def test_the_values_are_the_same() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 1, 16, 4, 4)).astype(np.float32)

    def blocked(array: np.ndarray) -> np.ndarray:
        return array.reshape(1, 2, 8, 4, 4).transpose(0, 1, 3, 4, 2)

    changed = blocked_part()
    assert (changed.received, changed.sent) == (("x", "y"), ("total", "positive"))
    total, positive = run(tvm.IRModule({"main": changed.function}), np.ascontiguousarray(blocked(x)), y)
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
    changed = blocked_part().function
    assert changed_parameters(changed) == [True, False]
    assert changed_parameters(Plain["main"]) == [False, False]
    assert [count_changes(function) for function in (Plain["main"], changed, Unblocked["main"])] == [0, 2, 1]
    layout, as_it_came = layouts_made(Unblocked["main"])
    assert BLOCKED.is_same(layout)
    assert as_it_came is None
    assert not BLOCKED.is_same(None)
    assert not BLOCKED.is_same(Layout(BLOCKED.shape, IndexMap.from_func(lambda n, c, h, w: (n, c % 2, h, w, c // 2))))
