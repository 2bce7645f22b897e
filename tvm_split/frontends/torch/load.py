"""Load torch modules with example inputs, exported programs and ``.pt2`` files as Models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.frontend import ImportRequest
from tvm_split.frontends.names import identifier
from tvm_split.frontends.reference import Arranged
from tvm_split.frontends.tested_versions import warn_if_untested
from tvm_split.frontends.torch.dimensions import TENSOR, bound_sizes, checked_leaves, constant_leaves, with_batch
from tvm_split.frontends.torch.graph import LayerNames, check_no_state, decomposed, fixed
from tvm_split.frontends.torch.importer import import_graph
from tvm_split.frontends.torch.reference import TorchReference
from tvm_split.frontends.torch.tensors import shown, to_numpy, to_torch
from tvm_split.model import Model, Reference

warn_if_untested("torch", str(torch.__version__), extra="torch")  # at import, so that it warns once

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
