"""Bind the open sizes of an exported program, and check example inputs against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from tvm_split.errors import ModelImportError
from tvm_split.frontends.dimensions import OpenSizes, rows_to_repeat
from tvm_split.frontends.torch.graph import user_inputs
from tvm_split.frontends.torch.tensors import shown

TENSOR = object()
"""A marker in ``constant_leaves`` for a leaf of the arguments that is a tensor."""


def constant_leaves(program: ExportedProgram) -> list[Any]:
    """For every leaf of the program's arguments, return TENSOR, or the constant that it was exported with."""
    leaves: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            leaves.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else TENSOR)
    return leaves


def with_batch(arguments: Any, batch: int) -> Any:
    """Return ``arguments`` with ``batch`` rows in every tensor, made by repeating rows. Raises ModelImportError."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if not rows_to_repeat(batch, [tensor.shape for tensor in tensors]):
        return arguments

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.cat([leaf] * -(-batch // leaf.shape[0]))[:batch].contiguous()

    return pytree.tree_map(repeated, arguments)


def checked_leaves(program: ExportedProgram, arguments: Any) -> list[Any]:
    """Return the tensors of the arguments, flat. Raises ModelImportError if number, dtypes or fixed sizes differ."""
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
                f"input {node.name!r} of the exported program is {shown(value)}, example_inputs has {shown(leaf)}"
            )
    return leaves


def bound_sizes(
    program: ExportedProgram, examples: Sequence[Any] | None, batch: int | None, dimensions: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of every symbol in the program's inputs: from ``dimensions``, ``batch``, or else the examples.

    A symbol is named by torch's name (``s77``) or by its place: ``x[1]`` is axis 1 of input ``x``.
    Raises ModelImportError if a symbol stays open, two sources disagree, or torch's own bounds are violated.
    """
    inputs = user_inputs(program)
    known = OpenSizes(batch, dimensions, symbols_are_names=False)
    has_open_batch = any(isinstance(size, torch.SymInt) for node in inputs for size in node.meta["val"].shape[:1])
    for node in inputs:
        for axis, size in enumerate(node.meta["val"].shape):
            place = f"{node.name}[{axis}]"
            if not isinstance(size, torch.SymInt):
                known.fixed(place, int(size))
                if axis == 0 and batch is not None and int(size) != batch and not has_open_batch:
                    raise ModelImportError(
                        f"batch={batch}, but axis 0 of input {node.name!r} was exported with the fixed size {int(size)}"
                        ". Export the model with dynamic_shapes for this axis, or with example inputs of this batch"
                    )
            elif size.node.expr.is_Symbol:
                known.open(str(size.node.expr), place)
            else:
                for symbol in size.node.expr.free_symbols:
                    known.places.setdefault(str(symbol), place)
    said = set(known.found)
    for node, example in zip(inputs, examples or [], strict=examples is not None):
        for axis, size in enumerate(node.meta["val"].shape):
            symbol = str(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol else ""
            if symbol and symbol not in said:
                known.bind(symbol, int(example.shape[axis]), f"the example input at {node.name}[{axis}]")
    sizes = known.sizes()
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) in sizes and not bounds.lower <= sizes[str(symbol)] <= bounds.upper:
            size, source = known.found[str(symbol)]
            raise ModelImportError(
                f"{source} gives {known.places[str(symbol)]} the size {size}, the program was exported for "
                f"{bounds.lower} to {bounds.upper}"
            )
    return sizes
