"""Which axes pass which operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tvm import relax
from tvm.relax import op

from relay_passes.ir import operator_name
from relay_passes.shards.dealt_axes import Axis, Passage
from relay_passes.shards.passing import RULES


def tensor(*shape: int) -> relax.Var:
    return relax.Var("x", relax.TensorType(shape, "float32"))


def passage(expression: relax.Expr, *axes: Axis | None) -> Passage | None:
    call = relax.BlockBuilder().normalize(expression)
    return RULES[operator_name(call)](call, axes)


CHANNELS = Axis(1, 1, 8)


@pytest.mark.parametrize(
    ("expression", "axis", "result"),
    [
        (op.reshape(tensor(2, 8, 3, 3), (2, 72)), CHANNELS, Axis(1, 1, 72)),
        (op.reshape(tensor(2, 5, 24), (2, 5, 3, 4, 2)), Axis(2, 3, 8), Axis(3, 1, 4)),
        (op.reshape(tensor(2, 5, 24), (2, 5, 3, 4, 2)), Axis(2, 12, 2), Axis(4, 1, 2)),
        (op.reshape(tensor(2, 5, 24), (10, 24)), Axis(2, 3, 8), Axis(1, 3, 8)),
        (op.reshape(tensor(2, 4, 3, 5, 2), (2, 12, 5, 2)), Axis(1, 1, 4), Axis(1, 1, 12)),
        (op.reshape(tensor(2, 3, 4), (2, 12)), Axis(2, 1, 4), Axis(1, 3, 4)),
        (op.reshape(tensor(2, 6), (2, 3, 2)), Axis(1, 2, 3), None),
        (op.permute_dims(tensor(2, 5, 4, 3), [0, 2, 1, 3]), Axis(2, 1, 4), Axis(1, 1, 4)),
        (op.squeeze(tensor(1, 8, 1), None), CHANNELS, Axis(0, 1, 8)),
        (op.expand_dims(tensor(8, 2), [0, 2]), Axis(0, 1, 8), CHANNELS),
        (op.strided_slice(tensor(2, 24), [1], [8], [24]), Axis(1, 3, 8), Axis(1, 2, 8)),
        (op.strided_slice(tensor(2, 24), [1], [4], [12]), Axis(1, 3, 8), None),
        (op.mean(tensor(2, 3, 8), [1]), Axis(2, 1, 8), CHANNELS),
        (op.max(tensor(2, 8), [1]), CHANNELS, None),
        (op.nn.softmax(tensor(2, 8), -1), CHANNELS, None),
        (op.nn.softmax(tensor(2, 8, 3), -1), CHANNELS, CHANNELS),
        (op.nn.max_pool2d(tensor(1, 8, 4, 4), (2, 2)), Axis(2, 1, 4), None),
    ],
)
def test_where_an_axis_goes(expression: relax.Expr, axis: Axis, result: Axis | None) -> None:
    found = passage(expression, axis)
    assert (found and found.results) == (result and (result,))


def test_only_a_split_into_several_axes_cuts_heads() -> None:
    heads = passage(op.reshape(tensor(2, 5, 24), (2, 5, 4, 6)), Axis(2, 1, 24))
    flat = passage(op.reshape(tensor(2, 8, 3, 3), (2, 72)), CHANNELS)
    assert heads is not None
    assert (heads.cuts, heads.blocks) == (True, 4)
    assert flat is not None
    assert not flat.cuts


def test_products_of_parts_are_summands() -> None:
    rows = passage(op.matmul(tensor(2, 8), tensor(8, 3)), CHANNELS, None)
    assert rows == Passage((CHANNELS, Axis(0, 1, 8)), (None,), sums=True)
    columns = passage(op.matmul(tensor(2, 3), tensor(3, 8)), None, CHANNELS)
    assert columns == Passage((None, CHANNELS), (CHANNELS,))
    heads = passage(op.matmul(tensor(1, 8, 3, 4), tensor(1, 8, 4, 3)), CHANNELS, CHANNELS)
    assert heads == Passage((CHANNELS, CHANNELS), (CHANNELS,))
    inputs = passage(op.nn.conv2d(tensor(1, 8, 4, 4), tensor(6, 8, 3, 3)), CHANNELS, None)
    assert inputs == Passage((CHANNELS, CHANNELS), (None,), sums=True)


def test_groups_are_dealt_out_whole() -> None:
    found = passage(op.nn.conv2d(tensor(1, 8, 4, 4), tensor(12, 2, 3, 3), groups=4), CHANNELS, None)
    assert found is not None
    assert found.operands == (CHANNELS, Axis(0, 1, 12))
    assert (found.results, found.blocks) == ((Axis(1, 1, 12),), 4)


def test_fields_of_a_concat_are_stretches() -> None:
    joined = op.concat([tensor(2, 8), tensor(2, 16)], 1)
    assert passage(joined, CHANNELS, Axis(1, 2, 8)) == Passage((CHANNELS, Axis(1, 2, 8)), (Axis(1, 3, 8),))
    assert passage(joined, CHANNELS, Axis(1, 1, 16)) is None
    assert passage(joined, CHANNELS, None) is None


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_part_of_a_reshaped_value_is_a_reshaped_part(data: st.DataObject, shape: list[int]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    after = data.draw(regrouped(shape))
    index = data.draw(st.integers(0, len(shape) - 1))
    repeats = data.draw(st.sampled_from([each for each in range(1, shape[index] + 1) if shape[index] % each == 0]))
    axis = Axis(index, repeats, shape[index] // repeats)
    found = passage(op.reshape(tensor(*shape), after), axis)
    if found is None or found.results[0] is None:
        return
    (result,) = found.results
    for begin, end in ((0, 1), (1, 2)):
        if max(axis.period, result.period) % 2 == 0 and axis.period % 2 == result.period % 2 == 0:
            part = axis.part_of(array, begin * axis.period // 2, end * axis.period // 2)
            whole = result.part_of(array.reshape(after), begin * result.period // 2, end * result.period // 2)
            np.testing.assert_array_equal(part.reshape(whole.shape), whole)


@st.composite
def regrouped(draw: st.DrawFn, shape: Sequence[int]) -> list[int]:
    """A shape of as many values: the factors of the lengths in order, joined anew."""
    factors = [factor for length in shape for factor in ((2, 2) if length == 4 else (length,))]
    groups: list[int] = []
    for factor in factors:
        if groups and draw(st.booleans()):
            groups[-1] *= factor
        else:
            groups.append(factor)
    return groups
