"""Bind the sizes that a model leaves open, and check that all sources of a size agree."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, OpenAxesError
from tvm_split.frontends import ImportRequest
from tvm_split.units import count_text


class Derived(NamedTuple):
    """An open size that follows from that of a ``symbol``: ``factor`` · symbol + ``offset``."""

    symbol: str
    factor: int
    offset: int


Specs = Sequence[tuple[str, Sequence[int | str | None], str]]
"""The name, sizes and dtype of each input; an open size is its symbol, or None if it has none."""
DerivedSpecs = Sequence[tuple[str, Sequence[int | str | Derived | None], str]]
"""`Specs` in which open sizes may also follow from others."""


def with_rows(arrays: list[Array], batch: int | None) -> list[Array]:
    """Return example inputs with ``batch`` rows, made by repeating their rows; unchanged if ``batch`` is None.

    Raises ModelImportError if their numbers of rows differ: then the batch axes are unknown.
    """
    rows = {array.shape[0] if array.ndim else None for array in arrays}
    if batch is None or rows == {batch}:
        return arrays
    if len(rows) != 1 or None in rows or 0 in rows:
        shown = ", ".join(str(list(array.shape)) for array in arrays)
        raise ModelImportError(
            f"batch={batch} does not say which axes to change: the first axes of the example inputs differ ({shown}). "
            "Leave batch out and give example inputs of the wanted sizes"
        )
    return [np.resize(array, (batch, *array.shape[1:])) for array in arrays]


def as_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as positional arguments, or as keyword arguments if they are a mapping."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)), {}


def in_order(names: Sequence[str], example_inputs: Any) -> list[Any]:
    """Return example inputs in the inputs' order, from a dict by name, a sequence or a single one.

    Raises ModelImportError for other names or another number of inputs.
    """
    if isinstance(example_inputs, Mapping):
        if set(example_inputs) != set(names):
            raise ModelImportError(f"the model's inputs are {names}, example_inputs has {sorted(example_inputs)}")
        return [example_inputs[name] for name in names]
    values = list(example_inputs) if isinstance(example_inputs, list | tuple) else [example_inputs]
    if len(values) != len(names):
        raise ModelImportError(
            f"the model's inputs are {', '.join(names)}, example_inputs has {count_text(len(values), 'value')}"
        )
    return values


class Bound(NamedTuple):
    """The size of a symbol, and a sentence that says where it comes from."""

    size: int
    reason: str


def bound_inputs(specs: Specs, request: ImportRequest) -> tuple[list[list[int]], list[Array] | None]:
    """Return the static shape of each input, and the example inputs if they have these shapes (else None).

    Open sizes come from ``dimensions``, ``batch`` or the examples, in this order. Raises ModelImportError.
    """
    named = [
        (name, [f"{name}[{axis}]" if size is None else size for axis, size in enumerate(shape)], dtype)
        for name, shape, dtype in specs
    ]
    examples = None if request.example_inputs is None else checked_examples(named, request.example_inputs)
    sizes = bound_sizes(named, request, examples)
    shapes = [[size if isinstance(size, int) else sizes[size].size for size in shape] for _, shape, _ in named]
    fits = examples is not None and [list(array.shape) for array in examples] == shapes
    return shapes, examples if fits else None


def checked_examples(specs: DerivedSpecs, example_inputs: Any) -> list[Array]:
    """Return the examples as arrays. Raises ModelImportError if a shape or dtype does not fit its input."""
    arrays = [np.asarray(value, order="C") for value in in_order([name for name, _, _ in specs], example_inputs)]
    for array, (name, shape, dtype) in zip(arrays, specs, strict=True):
        fits = array.ndim == len(shape) and all(
            not isinstance(size, int) or size == example_size
            for size, example_size in zip(shape, array.shape, strict=True)
        )
        if not fits or str(array.dtype) != dtype:
            sizes = [size if isinstance(size, int) else "open" for size in shape]
            raise ModelImportError(
                f"input {name!r} is {dtype}{sizes}, example_inputs has {array.dtype}{list(array.shape)}"
            )
    return arrays


def bound_sizes(
    specs: DerivedSpecs, request: ImportRequest, examples: Sequence[Array] | None, symbols_are_names: bool = True
) -> dict[str, Bound]:
    """Return the size of each symbol; open sizes that are None in ``specs`` are skipped, since others determine them.

    With ``symbols_are_names`` errors show the symbols, else the axis, such as ``x[1]``.

    Raises OpenAxesError for open sizes, and ModelImportError for names in ``dimensions`` that no axis has, and for two
    sizes of one axis.
    """
    wanted = request.dimensions
    axes = [(f"{name}[{axis}]", axis, size) for name, shape, _ in specs for axis, size in enumerate(shape)]
    direct = {size: place for place, _, size in reversed(axes) if isinstance(size, str)}
    derived = {size.symbol: place for place, _, size in reversed(axes) if isinstance(size, Derived)}
    symbols = dict.fromkeys(_symbol_of(size) for _, _, size in axes)
    places = {symbol: place for symbol in symbols if (place := direct.get(symbol) or derived.get(symbol))}
    _require_known(wanted, places, {place for place, _, size in axes if size is not None})
    has_open_batch = any(axis == 0 and not isinstance(size, int) for _, axis, size in axes)
    sizes: dict[str, Bound] = {}
    for symbol, place in places.items():
        if symbol in wanted:
            _bind(sizes, symbol, wanted[symbol], f"dimensions[{symbol!r}]", place)
    for place, axis, size in axes:
        if place in wanted:
            _bind(sizes, size, wanted[place], f"dimensions[{place!r}]", place)
        is_fixed = isinstance(size, int) and has_open_batch
        follows = isinstance(size, Derived) and size.symbol in direct
        if axis == 0 and request.batch is not None and not is_fixed and not follows:
            _bind(sizes, size, request.batch, "batch", place)
    explicit = set(sizes)
    example_sizes = [size for array in examples or () for size in array.shape]
    for (place, _, size), number in zip(axes, example_sizes, strict=examples is not None):
        if not isinstance(size, int) and _symbol_of(size) not in explicit:
            _bind(sizes, size, number, "the example input", place)
    names = {symbol: symbol if symbols_are_names else place for symbol, place in places.items() if symbol not in sizes}
    if names:
        first = [names[size] for _, axis, size in axes if axis == 0 and size in names]
        raise OpenAxesError({name: places[symbol] for symbol, name in names.items()}, first)
    return sizes


def _symbol_of(size: Any) -> Any:
    return size.symbol if isinstance(size, Derived) else size


def _bind(sizes: dict[str, Bound], size: Any, number: int, source: str, place: str) -> None:
    """Give ``size``, open or fixed, at ``place`` the size ``number``. Raises ModelImportError if it cannot have it."""
    reason = f"{source} gives {place} the size {number}"
    if size is None:
        return
    if isinstance(size, int):
        if number != size:
            raise ModelImportError(
                f"{reason}, the model has the fixed size {size} there; "
                "export it again with an open size, or use the model's own"
            )
        return
    if isinstance(size, Derived):
        number, rest = divmod(number - size.offset, size.factor)
        if rest or number < 1:
            raise ModelImportError(
                f"{reason}, the model has {size.factor} · n{size.offset:+d} there, for an integer n >= 1"
            )
    bound = sizes.setdefault(_symbol_of(size), Bound(number, reason))
    if bound.size != number:
        raise ModelImportError(f"{reason}, but {bound.reason}: both follow from one open size of the model")


def _require_known(wanted: Mapping[str, int], places: Mapping[str, str], axes: set[str]) -> None:
    """Raise ModelImportError if ``wanted`` names neither a symbol nor an axis."""
    for wrong in sorted(wanted.keys() - places.keys() - axes):
        listing = ", ".join(f"{place} ({symbol!r})" for symbol, place in places.items()) or "none"
        raise ModelImportError(f"dimensions names {wrong!r}, the model's open sizes are {listing}")
