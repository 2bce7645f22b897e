"""Export torch modules and functions; errors name the line of the user's network and what to do."""

from __future__ import annotations

import dis
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tvm_split.errors import ModelImportError, class_and_first_line
from tvm_split.frontends.convert import line_of_source
from tvm_split.frontends.torch.tensors import dtype_name, shown
from tvm_split.units import short_list

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_PART = "give the part of the network before or after that line"
_REASONS = {
    "data-dependent": (
        "it chooses, counts or makes a shape by the values of a tensor, which are known only while it runs",
        f"Write that line with torch.where or fixed sizes, or {_PART}",
    ),
    "in output, which is not a known type": (
        "it returns an object that is neither a tensor nor a tuple, list or dict of tensors",
        "Return its tensors; networks of Hugging Face do so with use_cache=False and return_dict=False",
    ),
    "Unsupported input type": (
        "an argument is neither a tensor nor a number, flag or None, nor a tuple, list or dict of these",
        "Give its tensors as arguments",
    ),
    "": ("", f"Write that line with other operations of torch, or {_PART}"),
}
"""Reasons and remedies by a part of torch's message; an empty reason stands for the first line of the message."""


class Called(nn.Module):  # type: ignore[misc]
    """A function or bound method as a module; the modules that it uses are its parts.

    ``only_part`` is the name of its part if there is one, which layer names leave out.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.called_function = function
        self.training = False
        for name, part in _modules_of(function).items():
            self.add_module(name if not hasattr(self, name) else f"{name}_", part)
        names = [name for name, _ in self.named_children()]
        self.only_part = names[0] if len(names) == 1 else ""

    def forward(self, *positional: Any, **keyword: Any) -> Any:
        return self.called_function(*positional, **keyword)


def _modules_of(function: Any) -> dict[str, nn.Module]:
    """Return the modules that a function uses, by name: its object or this one's attributes, closure and globals."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return {"module": owner}
    if isinstance(function, nn.Module):
        return {"module": function}
    values = dict(getattr(owner, "__dict__", {}))
    code = getattr(function, "__func__", function)
    if inspect.isfunction(code):
        read = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
        values |= {name: code.__globals__.get(name) for name in read} | dict(inspect.getclosurevars(code).nonlocals)
    return {name: value for name, value in values.items() if isinstance(value, nn.Module)}


def export(module: nn.Module, arguments: Arguments, name: str) -> ExportedProgram:
    """Export a module in evaluation mode; ``name`` is for errors. Raises ModelImportError."""
    _check_evaluation_mode(module, name)
    _check_not_quantized(module)
    positional, keyword = arguments
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(module, positional, keyword or None)
    except Exception as error:
        reason = _reason(error, partial(module, *positional, **keyword))
        inputs = ", ".join(map(shown, pytree.tree_leaves(arguments)))
        raise ModelImportError(f"torch.export cannot export {name} for inputs {inputs}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs inside the block; if it fails, also torch's graph, which it prints to stderr."""
    printed, level = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
    sys.stderr.write(printed.getvalue())


def _reason(error: Exception, run: Callable[[], Any]) -> str:
    """Return what torch.export complains about, the line of the network, and what to do."""
    reason, remedy = next(entry for part, entry in _REASONS.items() if part in str(error))
    if not reason:
        try:
            with torch.no_grad(), _quiet():
                run()
        except Exception as own_error:
            # Torch's messages about real tensors have the sizes, those about the traced ones often do not.
            error, remedy = own_error, "The network itself fails: give example_inputs that it can be called with"
        reason = class_and_first_line(error)
    return f"{reason.rstrip('.')}{line_of_source(error)}. {remedy}"


def _check_evaluation_mode(module: nn.Module, name: str) -> None:
    training = [
        path or type(part).__name__ for path, part in module.named_modules() if part.training and _matters(part)
    ]
    if training:
        raise ModelImportError(
            f"{name} is in training mode, which changes what these layers compute: "
            f"{short_list(training)}. Call model.eval() first"
        )


def _matters(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return float(part.p) > 0
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        return float(part.dropout) > 0
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


def _check_not_quantized(module: nn.Module) -> None:
    for path, part in module.named_modules():
        tensors = {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}
        weight = getattr(part, "weight", None)
        if callable(weight):  # modules of torch.ao keep their weights packed, and have a method that unpacks them
            tensors["weight"] = weight()
        for name, tensor in tensors.items():
            if getattr(tensor, "is_quantized", False):
                raise ModelImportError(
                    f"layer {path or type(part).__name__!r} has {name!r} of {dtype_name(tensor.dtype)}, quantized by "
                    "torch.ao, which torch.export cannot export: give the network of floats, or quantize the exported "
                    "ONNX or TFLite file"
                )
