"""From the MODEL argument to a model."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.frontends.frontend import file_suffixes, is_network

if TYPE_CHECKING:
    from rpc_runtime.program.program import TensorSpec
    from tvm_split.model import Model


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says of a model besides its source."""

    batch: options.BatchOption = None
    dimension: options.DimensionOption = None
    input_shape: options.InputShapeOption = None

    def load(self, source: str) -> Model:
        """Import the model.

        Raises:
            WrongUseError: there is no such file, module or function, or an option cannot be read.
            ModelImportError: the model cannot be imported.
        """
        from tvm_split.cli.inputs import random_inputs
        from tvm_split.errors import ModelImportError, OpenAxesError

        shapes = [_tensor(text) for text in self.input_shape or ()]
        given: Any
        if Path(source).suffix.lower() in file_suffixes() or Path(source).is_dir():
            if not Path(source).exists():
                raise WrongUseError(f"there is no file {source!r}", "MODEL")
            if shapes:
                raise WrongUseError(
                    "a file knows its inputs; bind open sizes with --batch or --dimension", "--input-shape"
                )
            given, examples = source, None
        else:
            given, examples = _from_python(source)
            if shapes:
                (examples,) = random_inputs(shapes, 1).stream(1)
        dimensions = dict(_dimension(text) for text in self.dimension or ())
        from tvm_split.frontends import load_model  # it loads TVM, so that what is wrong so far has been said at once

        try:
            return load_model(given, examples, batch=self.batch, dimensions=dimensions or None)
        except OpenAxesError as error:
            raise ModelImportError(f"{error.problem}; give sizes, for example {error.options}") from error


def _from_python(reference: str) -> tuple[Any, Any]:
    """The model and example inputs (or None) that ``module:name`` stands for."""
    module_name, separator, name = reference.partition(":")
    if not (separator and module_name and name):
        raise WrongUseError(
            f"{reference!r} is neither a file that ends in {' or '.join(file_suffixes())} nor MODULE:NAME",
            "MODEL",
        )
    # A script in the current folder is what a person means; installed console scripts do not look there.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        meant = f"; give the module, without its ending: {module_name[:-3]}:{name}" * module_name.endswith(".py")
        raise WrongUseError(f"cannot import {module_name!r}: {error}{meant}", "MODEL") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise WrongUseError(f"{module_name!r} has no {name!r}", "MODEL")
        found = getattr(found, part)
    if not is_network(found) and callable(found):
        _require_callable_alone(found, reference)
        found = found()
    model, examples = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if is_network(model) and hasattr(model, "eval"):
        model.eval()  # nothing is trained here, and a network in training mode has no single answer
    return model, examples


def _require_callable_alone(function: Any, reference: str) -> None:
    """Raise a `WrongUseError` for a function or class that cannot be called without arguments, with what can."""
    try:
        inspect.signature(function).bind()
    except ValueError:
        pass  # of C, which does not say
    except TypeError as error:
        name = reference.rpartition(":")[2]
        made = f"{name}(…)" if isinstance(function, type) else f"{name}(…), (example inputs,)"
        raise WrongUseError(
            f"{reference!r} cannot be called without arguments ({error}): name an nn.Module, or a function without "
            f"parameters that returns one and its example inputs, such as `def network(): return {made}`",
            "MODEL",
        ) from error


def _dimension(text: str) -> tuple[str, int]:
    name, separator, size = text.partition("=")
    if not (name and separator and size.isdigit() and int(size) > 0):
        raise WrongUseError(f"{text!r} is not NAME=SIZE", "--dimension")
    return name, int(size)


def _tensor(text: str) -> TensorSpec:
    import numpy as np

    from rpc_runtime.program.program import TensorSpec

    sizes, _, dtype = text.partition(":")
    if not all(size.strip().isdigit() for size in sizes.split(",")):
        raise WrongUseError(f"{text!r} is not a shape like 1,3,224,224 or 1,128:int64", "--input-shape")
    try:
        np.dtype(dtype or "float32")
    except TypeError as error:
        raise WrongUseError(f"{dtype!r} is no dtype of numpy", "--input-shape") from error
    return TensorSpec("input", tuple(int(size) for size in sizes.split(",")), dtype or "float32")
