"""Bind the sizes that a model leaves open, and check that all sources of a size agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvm_split.errors import ModelImportError, OpenAxesError
from tvm_split.frontends import ImportRequest

Array = np.ndarray[Any, Any]
Specs = Sequence[tuple[str, Sequence[int | None], str]]
"""The name, sizes (None: open) and dtype of each input."""


class OpenSizes:
    """The sizes of a model's symbols. An axis is named by its symbol (``N``) or its place (``x[1]``)."""

    def __init__(self, batch: int | None, dimensions: Mapping[str, int], symbols_are_names: bool = True) -> None:
        """``batch`` is the size of every open first axis; ``symbols_are_names`` if a person chose the symbols."""
        self.symbols_are_names = symbols_are_names
        self.batch = batch
        self.dimensions = dimensions
        self.found: dict[str, tuple[int, str]] = {}
        self.places: dict[str, str] = {}
        self.fixed_places: set[str] = set()
        self.first: set[str] = set()

    def open(self, symbol: str, place: str) -> None:
        """Record that ``place`` has the size ``symbol``, and bind it to a size in ``dimensions`` or ``batch``."""
        self.places.setdefault(symbol, place)
        self.bind(symbol, self.dimensions.get(place), f"dimensions[{place!r}]")
        self.bind(symbol, self.dimensions.get(symbol), f"dimensions[{symbol!r}]")
        if place.endswith("[0]"):
            self.first.add(symbol)
            self.bind(symbol, self.batch, "batch")

    def bind(self, symbol: str, size: int | None, source: str) -> None:
        """Bind a symbol to a size. Raises ModelImportError if another source gave a different size before."""
        if size is None:
            return
        first_size, first_source = self.found.setdefault(symbol, (size, source))
        if first_size != size:
            raise ModelImportError(
                f"{source} is {size}, but {first_source} says {first_size} for the same size ({symbol!r})"
            )

    def fixed(self, place: str, fixed: int, *sources: tuple[int | None, str]) -> None:
        """Record a fixed size. Raises ModelImportError if ``dimensions`` or one of the (size, source) pairs differs."""
        for size, source in ((self.dimensions.get(place), f"dimensions[{place!r}]"), *sources):
            if size is not None and size != fixed:
                raise ModelImportError(
                    f"{source} gives {place} the size {size}, the model has the fixed size {fixed} there; "
                    "export it again with an open size, or use the model's own"
                )
        self.fixed_places.add(place)

    def sizes(self) -> dict[str, int]:
        """Return every symbol's size. Raises OpenAxesError for open sizes, ModelImportError for unknown names."""
        for wrong in sorted(
            self.dimensions.keys() - self.places.keys() - set(self.places.values()) - self.fixed_places
        ):
            listing = ", ".join(f"{place} ({symbol!r})" for symbol, place in self.places.items()) or "none"
            raise ModelImportError(f"dimensions names {wrong!r}, the model's open sizes are {listing}")
        missing = {symbol: place for symbol, place in self.places.items() if symbol not in self.found}
        if missing:
            names = {symbol: symbol if self.symbols_are_names else place for symbol, place in missing.items()}
            first = [name for symbol, name in names.items() if symbol in self.first]
            raise OpenAxesError({names[symbol]: place for symbol, place in missing.items()}, first)
        return {symbol: size for symbol, (size, _) in self.found.items()}


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


def in_order(names: Sequence[str], given: Any) -> list[Any]:
    """Return example inputs in the inputs' order, from a dict by name, a sequence or a single one.

    Raises ModelImportError for other names or another number of inputs.
    """
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ModelImportError(f"the model's inputs are {names}, example_inputs has {sorted(given)}")
        return [given[name] for name in names]
    values = list(given) if isinstance(given, list | tuple) else [given]
    if len(values) != len(names):
        raise ModelImportError(
            f"the model takes {len(names)} inputs ({', '.join(names)}), example_inputs has {len(values)}"
        )
    return values


def bound_inputs(
    specs: Specs, request: ImportRequest, symbols: Mapping[str, str] | None = None
) -> tuple[list[list[int]], list[Array] | None]:
    """Return the static shape of each input, and the example inputs if they have these shapes (else None).

    Open sizes come from ``dimensions``, ``batch`` or the examples, in this order. ``symbols`` maps the place of an open
    size (``x[1]``) to its name; a size without a name is named by its place. Raises ModelImportError.
    """
    symbols = symbols or {}
    examples = None if request.example_inputs is None else checked_examples(specs, request.example_inputs)
    sizes = open_sizes(specs, examples, request, symbols).sizes()
    shapes = [
        [
            sizes[symbols.get(f"{name}[{axis}]", f"{name}[{axis}]")] if size is None else size
            for axis, size in enumerate(shape)
        ]
        for name, shape, _ in specs
    ]
    fits = examples is not None and [list(array.shape) for array in examples] == shapes
    return shapes, examples if fits else None


def checked_examples(specs: Specs, given: Any) -> list[Array]:
    """Return the examples as arrays. Raises ModelImportError if a shape or dtype does not fit its input."""
    arrays = [np.asarray(value, order="C") for value in in_order([name for name, _, _ in specs], given)]
    for array, (name, shape, dtype) in zip(arrays, specs, strict=True):
        fits = array.ndim == len(shape) and all(
            size in (None, example_size) for size, example_size in zip(shape, array.shape, strict=True)
        )
        if not fits or str(array.dtype) != dtype:
            shown = [size if size is not None else "open" for size in shape]
            raise ModelImportError(
                f"input {name!r} is {dtype}{shown}, example_inputs has {array.dtype}{list(array.shape)}"
            )
    return arrays


def open_sizes(
    specs: Specs,
    examples: Sequence[Array] | None,
    request: ImportRequest,
    symbols: Mapping[str, str],
    symbols_are_names: bool = True,
) -> OpenSizes:
    """Return the open sizes of inputs, bound as far as possible. A size with the symbol "" follows from others."""
    sizes = OpenSizes(request.batch, request.dimensions, symbols_are_names)
    has_open_batch = any(None in shape[:1] for _, shape, _ in specs)
    places = [(f"{name}[{axis}]", axis, size) for name, shape, _ in specs for axis, size in enumerate(shape)]
    for place, axis, size in places:
        symbol = symbols.get(place, place)
        if size is not None:
            sizes.fixed(place, size, *([(request.batch, "batch")] if axis == 0 and not has_open_batch else []))
        elif symbol:
            sizes.open(symbol, place)
    bound = set(sizes.found)
    example_sizes = [size for array in examples or () for size in array.shape]
    for (place, _, size), example in zip(places, example_sizes, strict=examples is not None):
        symbol = symbols.get(place, place)
        if size is None and symbol and symbol not in bound:
            sizes.bind(symbol, example, f"the example input at {place}")
    return sizes
