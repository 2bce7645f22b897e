from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I, relax as R

from relay_passes.bound_indices import BoundIndices
from tests.helpers.placements import QUICKLY
from tests.helpers.relax_graphs import module_of
from tvm_split.compiler.stage import code_of

Main = Callable[..., tuple[tvm.runtime.Tensor]]


def test_rows_that_are_not_there_are_not_numbers() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(words: R.Tensor((4,), "int64"), table: R.Tensor((10, 2), "float32"), ages: R.Tensor((10,), "int32")):
            with R.dataflow():
                rows = R.take(table, words, axis=0)
                age = R.take(ages, words, axis=0)
                wrapped = R.take(table, words, axis=0, mode="wrap")
                first = R.take(table, R.const(0, "int64"), axis=0)
                result = (rows, age, wrapped, first)
                R.output(result)
            return result

    @I.ir_module
    class Expected:
        @R.function
        def main(words: R.Tensor((4,), "int64"), table: R.Tensor((10, 2), "float32"), ages: R.Tensor((10,), "int32")):
            with R.dataflow():
                rows = R.take(table, words, axis=0, mode="nan")
                age = R.take(ages, words, axis=0, mode="clip")
                wrapped = R.take(table, words, axis=0, mode="wrap")
                first = R.take(table, R.const(0, "int64"), axis=0)
                result = (rows, age, wrapped, first)
                R.output(result)
            return result

    tvm.ir.assert_structural_equal(BoundIndices()(Before), Expected)


def test_coordinates_are_limited_each_by_its_axis() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(data: R.Tensor((3, 5, 7), "float32"), index: R.Tensor((4, 2), "int64")):
            with R.dataflow():
                gathered = R.gather_nd(data, index, batch_dims=0)
                result = (gathered,)
                R.output(result)
            return result

    @I.ir_module
    class Expected:
        @R.function
        def main(data: R.Tensor((3, 5, 7), "float32"), index: R.Tensor((4, 2), "int64")):
            with R.dataflow():
                above = R.maximum(index, R.const(0, "int64"))
                inside = R.minimum(above, R.const([2, 4], "int64"))
                gathered = R.gather_nd(data, inside, batch_dims=0)
                result = (gathered,)
                R.output(result)
            return result

    tvm.ir.assert_structural_equal(BoundIndices()(Before), Expected)


def mains(module: tvm.IRModule) -> list[Main]:
    """The compiled functions ``main`` of a module, before and after the pass."""
    both = (module, BoundIndices()(module))
    return [relax.VirtualMachine(code_of(variant, QUICKLY), tvm.cpu())["main"] for variant in both]


def gather_elements(data: relax.Expr, index: relax.Expr, updates: relax.Expr) -> relax.Expr:
    return relax.op.gather_elements(data, index, 1)


def scatter_elements(data: relax.Expr, index: relax.Expr, updates: relax.Expr) -> relax.Expr:
    return relax.op.scatter_elements(data, index, updates, 1, "add")


def scatter_nd(data: relax.Expr, index: relax.Expr, updates: relax.Expr) -> relax.Expr:
    return relax.op.scatter_nd(data, index, relax.op.take(updates, relax.const(0, "int64"), 1), "add")


@pytest.mark.parametrize("operation", [gather_elements, scatter_elements, scatter_nd])
def test_indices_inside_mean_what_they_did_and_no_others_leave_the_tensor(
    operation: Callable[[relax.Expr, relax.Expr, relax.Expr], relax.Expr],
) -> None:
    data = relax.Var("d", relax.TensorType((4, 5), "float32"))
    updates = relax.Var("u", relax.TensorType((4, 2), "float32"))
    index = relax.Var("i", relax.TensorType((4, 2), "int64"))
    module = module_of([data, index, updates], lambda builder: [builder.emit(operation(data, index, updates))])
    generator = np.random.default_rng(0)
    values = generator.standard_normal((4, 5), np.float32), generator.standard_normal((4, 2), np.float32)
    before, after = mains(module)

    def outcome(main: Main, indices: np.ndarray) -> np.ndarray:
        return main(*map(tvm.runtime.tensor, (values[0], indices, values[1])))[0].numpy()

    inside = generator.integers(0, 4, (4, 2))
    np.testing.assert_array_equal(outcome(before, inside), outcome(after, inside))
    outside = np.array([[10**9, -(10**9)]] * 4)
    largest = np.array([[3 if operation is scatter_nd else 4, 0]] * 4)
    if operation is scatter_nd:
        largest[:, 1] = 0
    np.testing.assert_allclose(outcome(after, outside), outcome(before, largest), rtol=1e-6)


@pytest.mark.parametrize("kind", ["roi_align", "roi_pool"])
def test_regions_are_of_images_that_there_are(kind: str) -> None:
    data = relax.Var("d", relax.TensorType((2, 1, 8, 8), "float32"))
    regions = relax.Var("r", relax.TensorType((2, 5), "float32"))
    sampling = {"sample_ratio": 2} if kind == "roi_align" else {}
    call = getattr(relax.op.vision, kind)(data, regions, (2, 2), 1.0, **sampling)
    plain, bounded = mains(module_of([data, regions], lambda builder: [builder.emit(call)]))
    values = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
    boxes = np.array([[1, 0, 0, 4, 4], [1, 1, 2, 6, 7]], np.float32)

    def outcome(main: Main, regions: np.ndarray) -> np.ndarray:
        return main(*map(tvm.runtime.tensor, (values, regions)))[0].numpy()

    right = outcome(plain, boxes)
    np.testing.assert_array_equal(outcome(bounded, boxes), right)
    for number in (1e7, -1e7, np.nan, np.inf):
        wrong = boxes.copy()
        wrong[1, 0] = number
        actual = outcome(bounded, wrong)
        np.testing.assert_array_equal(actual[0], right[0], err_msg=f"image {number}")
        assert np.isfinite(actual).all(), number
