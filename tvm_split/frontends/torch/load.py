"""Load torch modules with example inputs, exported programs and ``.pt2`` files as Models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError, UntriedVersionWarning
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.dimensions import OpenSizes, rows_to_repeat
from tvm_split.frontends.names import identifier
from tvm_split.frontends.reference import Arranged
from tvm_split.frontends.torch.graph import LayerNames, check_no_state, decomposed, fixed, user_inputs
from tvm_split.frontends.torch.importer import import_graph
from tvm_split.frontends.torch.reference import TorchReference
from tvm_split.frontends.torch.tensors import shown, to_numpy, to_torch
from tvm_split.model import Model, Reference

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def load_torch(
    source: nn.Module | ExportedProgram | str | Path, request: ImportRequest, has_channels_last: bool = False
) -> Model:
    """Return a Model of a torch module (with example inputs), an exported program, or a ``.pt2`` file of one.

    ``example_inputs`` is a tuple of positional arguments, a dict of keyword arguments, or one tensor. Arguments may
    be nested in dicts, lists and tuples; ``Model.inputs`` and ``Model.outputs`` are flat, in torch's pytree order.
    ``has_channels_last``: the network transposes around its convolutions; these transpositions are removed.
    Raises ModelImportError.
    """
    name = request.name
    if isinstance(source, nn.Module):
        _check_evaluation_mode(source)
    if isinstance(source, str | Path):
        name = name or Path(source).stem
        source = _read(Path(source))
    given = None if request.example_inputs is None else _as_arguments(request.example_inputs)
    if isinstance(source, nn.Module):
        if given is None:
            raise ModelImportError(
                f"{type(source).__name__} is a torch module: give example_inputs, a tuple of tensors with the shapes "
                "and dtypes the network will be run with"
            )
        if request.batch is not None:
            given = with_batch(given, request.batch)
        if request.dimensions:
            raise ModelImportError(
                "dimensions are for exported programs and ONNX files; the sizes of a torch module are those of its "
                f"example_inputs, so give inputs of the wanted sizes instead of dimensions={dict(request.dimensions)}"
            )
        name = name or type(source).__name__
        program, run = _export(source, given), source
    else:
        name = name or "model"
        program, run = source, source.module()
    return _model(program, run, given, replace(request, name=name), has_channels_last)


def _model(
    program: ExportedProgram,
    run: Callable[..., Any],
    given: Arguments | None,
    request: ImportRequest,
    has_channels_last: bool,
) -> Model:
    examples = None if given is None else checked_leaves(program, given)
    sizes = bound_sizes(program, examples, request.batch, request.dimensions)
    if examples is None and program.example_inputs is not None:
        examples = pytree.tree_leaves(program.example_inputs)
    lowered = decomposed(program)
    fixed(lowered, sizes)
    names = LayerNames(lowered)
    check_no_state(lowered, names)
    built = import_graph(lowered, names)
    if has_channels_last:
        built, orders = channels_first(built)
    inputs = built.inputs
    reference: Reference = TorchReference(run, _structure(program, len(inputs)), lowered, built.held)
    if has_channels_last:
        reference = Arranged(reference, orders)
    return Model(
        identifier(request.name or "model"), "torch", built.module, inputs, built.outputs(), built.layers, reference,
        _arrays(examples, inputs),
    )  # fmt: skip


def _arrays(examples: list[Any] | None, inputs: Sequence[TensorSpec]) -> tuple[Any, ...] | None:
    if examples is None:
        return None
    arrays = tuple(to_numpy(leaf) for leaf in examples if isinstance(leaf, torch.Tensor))
    fits = len(arrays) == len(inputs) and all(a.shape == spec.shape for a, spec in zip(arrays, inputs, strict=True))
    return arrays if fits else None


def _as_arguments(example_inputs: Any) -> Arguments:
    if isinstance(example_inputs, Mapping):
        return (), {key: _as_tensors(value) for key, value in example_inputs.items()}
    if isinstance(example_inputs, list | tuple):
        return tuple(_as_tensors(value) for value in example_inputs), {}
    return (_as_tensors(example_inputs),), {}


def _as_tensors(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: to_torch(leaf) if hasattr(leaf, "__array_interface__") else leaf, value)


def _structure(program: ExportedProgram, count: int) -> Callable[[Sequence[torch.Tensor]], Arguments]:
    """Return a function from flat tensors to the arguments of the program's source; other leaves are constant."""
    spec = program.call_spec.in_spec
    constants = constant_leaves(program)

    def arguments_of(tensors: Sequence[torch.Tensor]) -> Arguments:
        if len(tensors) != count:
            raise ModelImportError(f"the model takes {count} tensors, given are {len(tensors)}")
        waiting = iter(tensors)
        leaves = [next(waiting) if constant is TENSOR else constant for constant in constants]
        positional, keyword = pytree.tree_unflatten(leaves, spec)
        return tuple(positional), dict(keyword)

    return arguments_of


def _read(path: Path) -> ExportedProgram:
    try:
        return torch.export.load(str(path))
    except Exception as error:
        raise ModelImportError(
            f"{str(path)!r} cannot be read as a program saved by torch.export.save: {error}"
        ) from error


def _check_evaluation_mode(module: nn.Module) -> None:
    training = [
        path or type(part).__name__ for path, part in module.named_modules() if part.training and _matters(part)
    ]
    if training:
        shown = ", ".join(training[:5]) + (f" and {len(training) - 5} more" if len(training) > 5 else "")
        raise ModelImportError(
            f"{type(module).__name__} is in training mode, which changes what these layers compute: {shown}. "
            "Call model.eval() first"
        )


def _matters(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return float(part.p) > 0
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        return float(part.dropout) > 0
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


def _export(module: nn.Module, arguments: Arguments) -> ExportedProgram:
    positional, keyword = arguments
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(module, positional, keyword or None)
    except Exception as error:
        inputs = ", ".join(map(shown, pytree.tree_leaves(arguments)))
        raise ModelImportError(
            f"torch.export cannot export {type(module).__name__} for inputs {inputs}: "
            f"{type(error).__name__}: " + "\n".join(str(error).strip().splitlines()[:6])
        ) from error


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


def _warn_if_untested() -> None:
    """Warn if torch's version is outside the range that the extra ``torch`` of this project requires."""
    try:
        texts = metadata.requires("tvm-split") or []
    except metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        return
    for requirement in map(Requirement, texts):
        marker, tested = requirement.marker, requirement.specifier
        is_of_extra = requirement.name == "torch" and marker is not None and marker.evaluate({"extra": "torch"})
        if is_of_extra and not tested.contains(str(torch.__version__), prereleases=True):
            text = (
                f"torch {torch.__version__} is installed, and tvm-split is tested with torch{tested}. "
                f"If an import or its answers are wrong: pip install 'torch{tested}'"
            )
            warnings.warn(UntriedVersionWarning(text), stacklevel=2)


_warn_if_untested()  # at import, so that it warns once
