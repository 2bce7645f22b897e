from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.bound_indices import bound_indices
from relay_passes.ir import constant
from tests.helpers.placements import QUICKLY, run
from tests.helpers.relax_graphs import module_of
from tvm_split.compiler.stage import code_of


@pytest.mark.parametrize("is_constant", [False, True], ids=["computed", "constant"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_take_outside_gives_nan_or_the_nearest_element(dtype: str, is_constant: bool) -> None:
    table, index = relax.Var("t", relax.TensorType((10, 2), dtype)), relax.Var("i", relax.TensorType((4,), "int64"))
    rows, indices = np.arange(20).reshape(10, 2).astype(dtype), np.array([-1, 0, 9, 10**12])
    call = relax.op.take(table, constant(indices) if is_constant else index, 0, "fast")
    module = bound_indices(module_of([table, index], lambda builder: [builder.emit(call)]))
    nearest = rows[[0, 0, 9, 9]]
    expected = np.where([[True], [False], [False], [True]], np.nan, nearest) if dtype == "float32" else nearest
    np.testing.assert_array_equal(run(module, rows, indices)[0], expected)


def test_modes_of_the_source_and_valid_constants_stay() -> None:
    table, index = relax.Var("t", relax.TensorType((10, 2), "float32")), relax.Var("i", relax.TensorType((4,), "int64"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        wrapped = builder.emit(relax.op.take(table, index, 0, "wrap"))
        return [wrapped, builder.emit(relax.op.take(table, relax.const([0, 9], "int64"), 0))]

    module = module_of([table, index], emit)
    tvm.ir.assert_structural_equal(bound_indices(module), module)


OPERATIONS: dict[str, tuple[Callable[..., relax.Expr], list[int]]] = {
    "gather_elements": (lambda data, index, updates: relax.op.gather_elements(data, index, 1), [4]),
    "scatter_elements": (lambda data, index, updates: relax.op.scatter_elements(data, index, updates, 1, "add"), [4]),
    "gather_nd": (lambda data, index, updates: relax.op.gather_nd(data, index), [3, 4]),
    "scatter_nd": (lambda data, index, updates: relax.op.scatter_nd(data, index, first_column(updates), "add"), [3, 4]),
    "index_tensor": (lambda data, index, updates: relax.op.index_tensor(data, [index]), [3]),
    "index_put": (
        lambda data, index, updates: relax.op.index_put(
            data, (constant(np.ones((4, 1), "int64")), index), updates, True
        ),
        [4],
    ),
    "reverse_sequence": (lambda data, index, updates: relax.op.reverse_sequence(data, first_column(index)), [5]),
}
"""Operations on data of 4 x 5, and the highest index for both columns of an index of 4 x 2, or for each column."""


def first_column(tensor: relax.Expr) -> relax.Expr:
    return relax.op.take(tensor, relax.const(0, "int64"), 1, "clip")


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("is_constant", [False, True], ids=["computed", "constant"])
def test_indices_inside_mean_what_they_did_and_no_others_leave_the_tensor(name: str, is_constant: bool) -> None:
    operation, highest = OPERATIONS[name]
    data = relax.Var("d", relax.TensorType((4, 5), "float32"))
    updates = relax.Var("u", relax.TensorType((4, 2), "float32"))
    index = relax.Var("i", relax.TensorType((4, 2), "int64"))
    generator = np.random.default_rng(0)
    values = generator.standard_normal((4, 5), np.float32), generator.standard_normal((4, 2), np.float32)

    def outcome(numbers: np.ndarray, is_bounded: bool) -> np.ndarray:
        call = operation(data, constant(numbers) if is_constant else index, updates)
        module = module_of([data, index, updates], lambda builder: [builder.emit(call)])
        return run(bound_indices(module) if is_bounded else module, values[0], numbers, values[1])[0]

    inside = generator.integers(0, min(highest) + 1, (4, 2))
    np.testing.assert_array_equal(outcome(inside, True), outcome(inside, False))
    outside = np.array([[10**9, -(10**9)]] * 4, "int64")
    if name == "scatter_nd":
        outside = outside[:, :1].repeat(2, 1)
    lowest = -min(highest) - 1 if name in ("scatter_elements", "index_put") else 0
    np.testing.assert_allclose(outcome(outside, True), outcome(np.clip(outside, lowest, highest), False), rtol=1e-6)


def test_an_index_too_narrow_for_all_lengths_is_limited_to_its_own_range() -> None:
    data, index = relax.Var("d", relax.TensorType((300,), "float32")), relax.Var("i", relax.TensorType((3,), "int8"))
    module = module_of([data, index], lambda builder: [builder.emit(relax.op.gather_elements(data, index))])
    values = np.arange(300, dtype="float32")
    (actual,) = run(bound_indices(module), values, np.array([127, -128, 5], "int8"))
    assert actual.tolist() == [127, 0, 5]


@pytest.mark.parametrize("kind", ["roi_align", "roi_pool"])
def test_regions_are_of_images_that_there_are(kind: str) -> None:
    data = relax.Var("d", relax.TensorType((2, 1, 8, 8), "float32"))
    regions = relax.Var("r", relax.TensorType((2, 5), "float32"))
    sampling = {"sample_ratio": 2} if kind == "roi_align" else {}
    call = getattr(relax.op.vision, kind)(data, regions, (2, 2), 1.0, **sampling)
    plain = module_of([data, regions], lambda builder: [builder.emit(call)])
    values = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
    boxes = np.array([[1, 0, 0, 4, 4], [1, 1, 2, 6, 7]], np.float32)

    (right,) = run(plain, values, boxes)
    main = relax.VirtualMachine(code_of(bound_indices(plain), QUICKLY), tvm.cpu())["main"]

    def outcome(regions: np.ndarray) -> np.ndarray:
        return main(*map(tvm.runtime.tensor, (values, regions)))[0].numpy()

    np.testing.assert_array_equal(outcome(boxes), right)
    for number in (1e7, -1e7, np.nan, np.inf):
        wrong = boxes.copy()
        wrong[1, 0] = number
        actual = outcome(wrong)
        np.testing.assert_array_equal(actual[0], right[0], err_msg=f"image {number}")
        assert np.isfinite(actual).all(), number
