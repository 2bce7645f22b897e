"""Import trained networks of several frameworks as ``tvm_split.model.Model``."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_split.errors import ModelImportError
from tvm_split.frontends.frontend import FRONTENDS, Frontend, ImportRequest, frontend_of

if TYPE_CHECKING:
    from tvm_split.model import Model

__all__ = ["FRONTENDS", "Frontend", "ImportRequest", "load_model"]

MOST_ELEMENTS = 2**31 - 1
"""The largest size of an axis: some importers and frameworks use 32-bit sizes."""

_LOCK = threading.RLock()
"""Held during an import: tracing patches classes of the frameworks, which must not overlap."""


def load_model(
    source: Any,
    example_inputs: Any = None,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    name: str | None = None,
) -> Model:
    """Import a trained network as a Model.

    ``source`` is one of these; installed packages may add others:

    - torch: an ``nn.Module`` (needs ``example_inputs``), an ``ExportedProgram``, or the path of one (``.pt2``)
    - ONNX: a path, bytes or a ``ModelProto``
    - JAX: a function or a module of Flax (needs ``example_inputs``), or the result of ``jax.export`` (``.jax``)
    - StableHLO: a file (``.mlir`` as text or bytecode, ``.mlirbc``)
    - Keras: a model or its ``.keras`` file; TFLite: a ``.tflite`` file or its bytes; TensorFlow: a SavedModel folder
    - a Model, which is returned unchanged

    ``example_inputs`` is a tuple of tensors or arrays, a single one, or a dict by name. ``batch`` binds an open first
    axis, ``dimensions`` binds open sizes by name, and the other open sizes come from ``example_inputs``. ``name`` is
    the name of the Model. One network is imported at a time; other threads wait.

    Raises:
        ModelImportError: the file is unreadable, the kind of source is unknown, the framework is not installed,
            operators cannot be imported (named with their layers), sizes are open or invalid, or examples do not fit.
    """
    from tvm_split.model import Model  # imported here: it loads TVM, which the table of frontends does not need

    if isinstance(source, Model):
        return source
    request = ImportRequest(example_inputs, batch, dict(dimensions or {}), name)
    _require_sizes(request)
    frontend = frontend_of(source)
    if isinstance(source, str | Path) and Path(source).suffix.lower() in frontend.suffixes:
        _require_file(Path(source), frontend)
    install = frontend.install or f"tvm-split[{frontend.name}]"
    for package in frontend.packages:
        if importlib.util.find_spec(package) is None:
            raise ModelImportError(
                f"importing this model needs {package}, which is not installed: pip install {install}"
            )
    module, _, function = frontend.load.partition(":")
    with _LOCK:
        model: Model = getattr(importlib.import_module(module), function)(source, request)
    return model


def _require_sizes(request: ImportRequest) -> None:
    sizes = {f"dimensions[{name!r}]": size for name, size in request.dimensions.items()}
    if request.batch is not None:
        sizes["batch"] = request.batch
    for shown, size in sizes.items():
        is_whole = isinstance(size, Integral) and not isinstance(size, bool)
        if not is_whole or not 1 <= size <= MOST_ELEMENTS:
            raise ModelImportError(f"{shown} is {size!r}; a size is a whole number from 1 to {MOST_ELEMENTS}")


def _require_file(path: Path, frontend: Frontend) -> None:
    """Raise unless a file exists and begins like one of its suffix. This check needs no installed framework."""
    if not path.is_file():
        raise ModelImportError(f"there is no file {str(path)!r}")
    with path.open("rb") as file:
        content = file.read(4096)
    suffix = path.suffix.lower()
    if not content:
        raise ModelImportError(f"{str(path)!r} is empty")
    if not frontend.is_intact(suffix, content):
        raise ModelImportError(f"{str(path)!r} is damaged, or no {suffix} file: it does not begin as one")
