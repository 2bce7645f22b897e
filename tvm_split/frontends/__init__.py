"""From a trained network in its own framework to ``tvm_split.model.Model``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvm_split.errors import ModelImportError
from tvm_split.model import Model

__all__ = ["load_model"]


def load_model(
    source: Any,
    example_inputs: Any = None,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    name: str | None = None,
) -> Model:
    """Import a trained network.

    ``source`` is a torch ``nn.Module`` (needs ``example_inputs``), a torch ``ExportedProgram`` or the path of one
    (``.pt2``), an ONNX model as a path, bytes or ``ModelProto``, or a Model, which is returned as it is.
    ``example_inputs`` is a tuple of tensors or arrays (one alone is accepted), or a dict by name. Sizes that the
    source leaves open are bound: ``batch`` binds the first axis, ``dimensions`` binds by name, the rest follow from
    the example inputs.

    Raises ModelImportError: unreadable file, unknown kind of source, framework not installed, operators that cannot be
    imported (each with its layer), open sizes, or example inputs that do not fit.
    """
    if isinstance(source, Model):
        return source
    framework = _framework(source)
    if importlib.util.find_spec(framework) is None:
        raise ModelImportError(
            f"importing this model needs {framework}, which is not installed: pip install tvm-split[{framework}]"
        )
    if framework == "torch":
        from tvm_split.frontends.torch_frontend import load_torch

        return load_torch(source, example_inputs, batch=batch, dimensions=dimensions, name=name)
    from tvm_split.frontends.onnx_frontend import load_onnx

    return load_onnx(source, example_inputs, batch=batch, dimensions=dimensions, name=name)


def _framework(source: Any) -> str:
    """Which framework a source belongs to, without importing any."""
    if isinstance(source, bytes | bytearray | memoryview):
        return "onnx"
    if isinstance(source, str | Path):
        suffix = Path(source).suffix.lower()
        if suffix == ".onnx":
            return "onnx"
        if suffix == ".pt2":
            return "torch"
        raise ModelImportError(
            f"{str(source)!r} is neither an .onnx file nor a .pt2 file (written by torch.export.save); "
            "other files (checkpoints, TorchScript) hold no exported graph: load them in torch and give the nn.Module"
        )
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(source).__mro__}
    if bases & {"torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram"}:
        return "torch"
    if type(source).__name__ == "ModelProto":
        return "onnx"
    raise ModelImportError(
        f"a {type(source).__module__}.{type(source).__qualname__} is no model that can be imported: give a torch "
        "nn.Module or ExportedProgram, a .pt2 or .onnx path, or an ONNX ModelProto or its bytes"
    )
