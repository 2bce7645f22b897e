"""Sizes that an exported program leaves open, and the checks of example inputs against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from tvm_split.errors import ModelImportError, OpenAxesError

TENSOR = object()
"""Stands for a leaf of the arguments that is a tensor (in ``constant_leaves``)."""


def user_inputs(program: ExportedProgram) -> list[fx.Node]:
    """The placeholders of the tensors that the user gives, in order."""
    specs = program.graph_signature.input_specs
    placeholders = program.graph.find_nodes(op="placeholder")
    return [
        node
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind is InputKind.USER_INPUT and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def constant_leaves(program: ExportedProgram) -> list[Any]:
    """For every leaf of the program's arguments: TENSOR, or the constant that it was exported with."""
    leaves: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            leaves.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else TENSOR)
    return leaves


def with_batch(arguments: Any, batch: int) -> Any:
    """``arguments`` with ``batch`` rows in every tensor, made by repeating the rows of the example.

    All tensors must have the same number of rows, or it is not known which first axes are the batch's.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    rows = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if rows == {batch}:
        return arguments
    if len(rows) != 1 or None in rows or 0 in rows:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ModelImportError(
            f"batch={batch} does not say which axes to change: the first axes of the example inputs differ ({shapes}). "
            "Leave batch out and give example inputs of the wanted sizes"
        )

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.cat([leaf] * -(-batch // leaf.shape[0]))[:batch].contiguous()

    return pytree.tree_map(repeated, arguments)


def checked_leaves(program: ExportedProgram, arguments: Any) -> list[Any]:
    """The flat arguments, after checking their number, dtypes and fixed sizes against the program."""
    positional, keyword = arguments
    leaves = [leaf for leaf in pytree.tree_leaves((positional, keyword)) if isinstance(leaf, torch.Tensor)]
    wanted = user_inputs(program)
    if len(leaves) != len(wanted):
        raise ModelImportError(
            f"the exported program takes {len(wanted)} tensors ({', '.join(node.name for node in wanted)}), "
            f"example_inputs has {len(leaves)}"
        )
    for node, leaf in zip(wanted, leaves, strict=True):
        value = node.meta["val"]
        fits = leaf.dim() == value.dim() and all(
            isinstance(size, torch.SymInt) or int(size) == given
            for size, given in zip(value.shape, leaf.shape, strict=True)
        )
        if not fits or leaf.dtype != value.dtype:
            raise ModelImportError(
                f"input {node.name!r} of the exported program is {_shown(value)}, example_inputs has {_shown(leaf)}"
            )
    return leaves


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in tensor.shape)}]"


def sizes(
    program: ExportedProgram, examples: Sequence[Any] | None, batch: int | None, dimensions: Mapping[str, int]
) -> dict[str, int]:
    """Every symbol of the program's inputs and its size, from ``dimensions``, ``batch`` or the examples, in this order.

    A symbol has torch's name (``s77``), or is called by its place: ``x[1]`` is axis 1 of input ``x``.
    Raises ModelImportError if a symbol is left open, two sources disagree, or torch's own bounds are violated.
    """
    found: dict[str, tuple[int, str]] = {}
    places: dict[str, str] = {}
    expressions: list[tuple[Any, int, str]] = []
    inputs = user_inputs(program)
    for index, node in enumerate(inputs):
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, torch.SymInt):
                if axis == 0 and batch is not None and int(size) != batch and not _has_symbols(inputs):
                    raise ModelImportError(
                        f"batch={batch}, but axis 0 of input {node.name!r} was exported with the fixed size {int(size)}"
                        ". Export the model with dynamic_shapes for this axis, or with example inputs of this batch"
                    )
                continue
            expression = size.node.expr
            place = f"{node.name}[{axis}]"
            for symbol in expression.free_symbols:
                places.setdefault(str(symbol), place)
            if expression.is_Symbol:
                _take(found, str(expression), dimensions.get(place), f"dimensions[{place!r}]")
                _take(found, str(expression), dimensions.get(str(expression)), f"dimensions[{str(expression)!r}]")
                if axis == 0:
                    _take(found, str(expression), batch, "batch")
            if examples is not None:
                expressions.append((expression, int(examples[index].shape[axis]), place))
    known = set(places) | set(places.values())
    for wrong in dimensions:
        if wrong not in known and not any(
            wrong == f"{n.name}[{a}]" for n in inputs for a in range(n.meta["val"].dim())
        ):
            raise ModelImportError(f"dimensions names {wrong!r}, the program's open sizes are {_open(places)}")
    for expression, size, place in expressions:
        if expression.is_Symbol and str(expression) not in found:
            found[str(expression)] = (size, f"the example input at {place}")
    missing = [place for symbol, place in places.items() if symbol not in found]
    if missing:
        raise OpenAxesError({place: place for place in missing}, [each for each in missing if each.endswith("[0]")])
    _check_bounds(program, found, places)
    return {symbol: size for symbol, (size, _) in found.items()}


def _has_symbols(inputs: Sequence[fx.Node]) -> bool:
    return any(node.meta["val"].dim() and isinstance(node.meta["val"].shape[0], torch.SymInt) for node in inputs)


def _open(places: Mapping[str, str]) -> str:
    return ", ".join(f"{place} ({symbol})" for symbol, place in places.items()) or "none"


def _take(found: dict[str, tuple[int, str]], symbol: str, size: int | None, source: str) -> None:
    if size is None:
        return
    before = found.get(symbol)
    if before is not None and before[0] != size:
        raise ModelImportError(f"{source} is {size}, but {before[1]} says {before[0]} for the same size ({symbol})")
    found.setdefault(symbol, (size, source))


def _check_bounds(program: ExportedProgram, found: Mapping[str, tuple[int, str]], places: Mapping[str, str]) -> None:
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) in found:
            size, source = found[str(symbol)]
            if not bounds.lower <= size <= bounds.upper:
                raise ModelImportError(
                    f"{source} gives {places.get(str(symbol), symbol)} the size {size}, the program was exported for "
                    f"{bounds.lower} to {bounds.upper}"
                )
