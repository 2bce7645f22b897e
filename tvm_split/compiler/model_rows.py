"""Finds which axes of a model's inputs and outputs are the rows of a batch, if these do not mix."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from relay_passes.sharding.free_rows import free_rows
from relay_passes.sharding.region import ShardError
from tvm_split.compiler.rows import Rows
from tvm_split.compiler.sharding import naming_layers
from tvm_split.model import Model, Reference

Arrays = Sequence[np.ndarray]


def rows_of(model: Model) -> Rows:
    """Return the rows of a model by the rules of its operators."""
    try:
        return Rows(*free_rows(model.module), mixed="")
    except ShardError as error:
        return Rows(mixed=naming_layers(model, error))


def checked_rows(
    rows: Rows, source: Reference, inputs: Arrays, expected: Arrays, is_equal: Callable[..., bool]
) -> Rows:
    """Return the rows; with ``mixed`` if the source gives the last row other values in a batch of another size.

    It may depend on the number of rows, which the imported graph does not show. It runs on the last two rows, or on one
    more row than ``inputs`` have; a source that takes one size only is not checked. ``is_equal`` takes the position of
    an output and two of its arrays.
    """
    if rows.mixed:
        return rows
    resized = [
        array if not has_rows else array[-2:] if len(array) > 2 else np.concatenate([array[:1, ..., ::-1], array])
        for array, has_rows in zip(inputs, rows.inputs, strict=True)
    ]
    try:
        outputs = zip(rows.outputs, expected, source.outputs(resized), strict=True)
    except Exception:  # it takes this size only
        return rows
    for place, (axis, *both) in enumerate(outputs):
        if not is_equal(place, *(array.take([-1], axis) if axis < array.ndim else array for array in reversed(both))):
            return replace(rows, mixed=f"the source gives other values for output {place} in batches of other sizes")
    return rows
