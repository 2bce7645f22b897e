"""Arrange what a user gives for a micro-batch, by position or by name, in the order of the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rpc_runtime.errors import InputError
from rpc_runtime.program.program import TensorSpec
from tvm_split.frontends.names import identifier


def inputs_of_call(expected: Sequence[TensorSpec], given: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
    """Return the inputs of a call in the model's order; names are the model's own, or those of its source.

    A single dict, or a single tuple of arrays, stands for all inputs, as in a stream.

    Raises:
        InputError: a name is unknown, is missing, or is that of an input that has its value by position.
    """
    if len(given) == 1 and not named and (isinstance(given[0], Mapping) or _has_all(expected, given[0])):
        return inputs_of_batch(expected, given[0])
    if not named:
        return given
    rest = [spec.name for spec in expected[len(given) :]]
    by_name = {identifier(str(name)): value for name, value in named.items()}
    if set(rest) != set(by_name) or len(by_name) < len(named):
        by_position = f"{len(given)} by position and " if given else ""
        raise InputError(
            f"the model takes {len(expected)} inputs ({', '.join(map(str, expected))}), {by_position}those with the "
            f"names {', '.join(map(str, named))} were given"
        )
    return [*given, *(by_name[name] for name in rest)]


def inputs_of_batch(expected: Sequence[TensorSpec], batch: Any) -> Sequence[Any]:
    """Return the inputs of one micro-batch of a stream: a dict by name, a tuple or list of all, or a bare array."""
    if isinstance(batch, Mapping):
        return inputs_of_call(expected, (), batch)
    return batch if isinstance(batch, tuple | list) else (batch,)


def _has_all(expected: Sequence[TensorSpec], value: Any) -> bool:
    """Whether a value is a tuple with an array for each input, and not one input that is written as a tuple."""
    return (
        isinstance(value, tuple)
        and len(value) == len(expected)
        and all(getattr(array, "ndim", None) == len(spec.shape) for array, spec in zip(value, expected, strict=True))
    )
