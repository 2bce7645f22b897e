"""From a trained network in its own framework to ``tvm_split.model.Model``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from numbers import Integral
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
    (``.pt2``), an ONNX model as a path, bytes or ``ModelProto``, a function of JAX or a module of Flax (need
    ``example_inputs``), what ``jax.export`` makes of one (``.jax``), a StableHLO module (``.mlir`` as text or bytecode,
    ``.mlirbc``), a Keras model or its ``.keras`` file, a TFLite file (``.tflite``) or its bytes, the folder of a
    TensorFlow SavedModel, or a Model, which is returned as it is.
    ``example_inputs`` is a tuple of tensors or arrays (one alone is accepted), or a dict by name. Sizes that the
    source leaves open are bound: ``batch`` binds the first axis, ``dimensions`` binds by name, the rest follow from
    the example inputs.

    Raises ModelImportError: unreadable file, unknown kind of source, framework not installed, operators that cannot be
    imported (each with its layer), open sizes, sizes that are none, or example inputs that do not fit.
    """
    if isinstance(source, Model):
        return source
    _require_sizes(batch, dimensions or {})
    framework = _framework(source)
    if isinstance(source, str | Path) and framework != "tensorflow":
        _require_file(Path(source))
    for package in _NEEDED[framework]:
        if importlib.util.find_spec(package) is None:
            raise ModelImportError(
                f"importing this model needs {package}, which is not installed: pip install tvm-split[{framework}]"
            )
    load = getattr(importlib.import_module(f"tvm_split.frontends.{framework}_frontend"), f"load_{framework}")
    model: Model = load(source, example_inputs, batch=batch, dimensions=dimensions, name=name)
    return model


def _require_sizes(batch: Any, dimensions: Mapping[str, Any]) -> None:
    for said, size in (("batch", batch), *((f"dimensions[{name!r}]", each) for name, each in dimensions.items())):
        is_whole = isinstance(size, Integral) and not isinstance(size, bool)
        if (size is not None or said != "batch") and not (is_whole and 1 <= size <= MOST_ELEMENTS):
            raise ModelImportError(f"{said} is {size!r}; a size is a whole number from 1 to {MOST_ELEMENTS}")


MOST_ELEMENTS = 2**31 - 1
"""Along one axis: importers and frameworks count in 32 bits here and there."""

_NEEDED = {
    "torch": ("torch",),
    "onnx": ("onnx",),
    "jax": ("jax",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "jax"),
    "tflite": ("tflite", "ai_edge_litert"),
}
"""By extra, which is also the frontend's name: the packages that it imports."""

_BY_SUFFIX = {
    ".onnx": "onnx",
    ".pt2": "torch",
    **dict.fromkeys((".mlir", ".mlirbc", ".stablehlo", ".jax"), "jax"),
    ".keras": "keras",
    ".tflite": "tflite",
}

_BY_CLASS = {
    "torch.nn.modules.module.Module": "torch",
    "torch.export.exported_program.ExportedProgram": "torch",
    "flax.linen.module.Module": "jax",
    "flax.nnx.module.Module": "jax",
    "jax._src.export._export.Exported": "jax",
    "keras.src.models.model.Model": "keras",
}
"""By base class; Keras's comes before torch's, whose module it is as well where it computes with torch."""


def _framework(source: Any) -> str:
    """Which framework a source belongs to, without importing any."""
    if isinstance(source, bytes | bytearray | memoryview):
        if bytes(source[4:8]) == _TFLITE:
            return "tflite"
        return "jax" if bytes(source[:4]) == _MLIR_BYTECODE else "onnx"
    if isinstance(source, str | Path):
        if (Path(source) / "saved_model.pb").is_file():
            return "tensorflow"
        suffix = Path(source).suffix.lower()
        if suffix in _BY_SUFFIX:
            return _BY_SUFFIX[suffix]
        raise ModelImportError(
            f"{str(source)!r} is none of the files that are imported: .onnx, .pt2 (written by torch.export.save), "
            ".mlir and .mlirbc (StableHLO), .jax (serialised by jax.export), .keras, .tflite, the folder of a "
            "SavedModel; other files (checkpoints, TorchScript) hold no exported graph: load them in their framework "
            "and give the module"
        )
    found = [_BY_CLASS[name] for base in type(source).__mro__ if (name := _class_name(base)) in _BY_CLASS]
    if found:
        return "keras" if "keras" in found else found[0]
    if type(source).__name__ == "ModelProto":
        return "onnx"
    if callable(source) and not isinstance(source, type):
        return "jax"
    raise ModelImportError(
        f"a {type(source).__module__}.{type(source).__qualname__} is no model that can be imported: give a torch "
        "nn.Module or ExportedProgram, a module of Flax or a function of JAX, a Keras model, the path of a .pt2, "
        ".onnx, .mlir, .jax, .keras or .tflite file, or an ONNX ModelProto or its bytes"
    )


_MLIR_BYTECODE = b"ML\xefR"
_TFLITE = b"TFL3"
_ARCHIVE = b"PK"


def _require_file(path: Path) -> None:
    """That a file is there and begins as one of its ending does: nobody should install a framework to hear that."""
    if not path.is_file():
        raise ModelImportError(f"there is no file {str(path)!r}")
    with path.open("rb") as file:
        begin = file.read(4096)
    suffix = path.suffix.lower()
    if not begin:
        raise ModelImportError(f"{str(path)!r} is empty")
    if suffix in (".pt2", ".keras") and not begin.startswith(_ARCHIVE):
        raise ModelImportError(f"{str(path)!r} is damaged, or no {suffix} file: these are archives, and it is none")
    if suffix in (".mlir", ".mlirbc", ".stablehlo") and not begin.startswith(_MLIR_BYTECODE) and b"\0" in begin:
        raise ModelImportError(f"{str(path)!r} is damaged: it is neither MLIR's bytecode nor text")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
