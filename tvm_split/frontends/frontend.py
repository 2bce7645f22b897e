"""The table of frontends: the sources, packages and loader of each. It imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpc_runtime.registry import Registry
from tvm_split.errors import ModelImportError


@dataclass(frozen=True)
class ImportRequest:
    """The arguments of `load_model` besides the source; its docstring explains each."""

    example_inputs: Any = None
    batch: int | None = None
    dimensions: Mapping[str, int] = field(default_factory=dict)
    name: str | None = None


def begins_as_wanted(suffix: str, content: bytes) -> bool:
    """Return True for every file: the default of `Frontend.is_intact`, as most formats have no fixed first bytes."""
    return True


@dataclass(frozen=True)
class Frontend:
    """One kind of source, and how to load it as a Model.

    Args:
        name: the framework's name.
        title: a description of its sources, such as "models in ONNX files".
        load: ``module:function`` of (source, `ImportRequest`) → Model; imported when it is used.
        packages: the import names of the packages that it needs.
        install: the argument of ``pip install`` for them; by default the extra of its name, ``tvm-split[name]``.
        suffixes: the suffixes of its files, in lower case.
        classes: full names of base classes of its sources, which are compared without importing them.
        claims: whether it takes a source without such a suffix or class: bytes, folders, functions.
        rank: if several frontends take a source, the one with the highest rank loads it.
        is_intact: whether a file of this suffix may begin with these bytes.
    """

    name: str
    title: str
    load: str
    packages: tuple[str, ...] = ()
    install: str = ""
    suffixes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    claims: Callable[[Any], bool] = lambda source: False
    rank: int = 0
    is_intact: Callable[[str, bytes], bool] = begins_as_wanted

    def takes(self, source: Any) -> bool:
        """Whether this frontend can load ``source``."""
        is_file = isinstance(source, str | Path) and Path(source).suffix.lower() in self.suffixes
        return is_file or self.has_class_of(source) or self.claims(source)

    def has_class_of(self, source: Any) -> bool:
        """Whether ``source`` is an object of the framework: a network, or its exported form."""
        return any(f"{base.__module__}.{base.__qualname__}" in self.classes for base in type(source).__mro__)


_TFLITE = b"TFL3"
_MLIR_BYTECODE = b"ML\xefR"


def _is_bytes(source: Any) -> bool:
    return isinstance(source, bytes | bytearray | memoryview)


def _is_archive(suffix: str, content: bytes) -> bool:
    return content.startswith(b"PK")


def _is_mlir(suffix: str, content: bytes) -> bool:
    return suffix == ".jax" or content.startswith(_MLIR_BYTECODE) or b"\0" not in content


def _is_function_or_bytecode(source: Any) -> bool:
    if _is_bytes(source):
        return bytes(source[:4]) == _MLIR_BYTECODE
    return callable(source) and not isinstance(source, type)


_TABLE = (
    Frontend(
        "torch", "models of PyTorch", "tvm_split.frontends.torch.load:load_torch",
        packages=("torch",), suffixes=(".pt2",), is_intact=_is_archive,
        classes=("torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram"),
    ),
    Frontend(
        "onnx", "models in ONNX files", "tvm_split.frontends.onnx.load:load_onnx",
        packages=("onnx",), suffixes=(".onnx",), classes=("onnx.onnx_ml_pb2.ModelProto",),
        claims=_is_bytes, rank=-2,  # takes bytes that no other frontend takes
    ),
    Frontend(
        "jax", "models of JAX and Flax, and StableHLO files", "tvm_split.frontends.jax.load:load_jax",
        packages=("jax",), suffixes=(".mlir", ".mlirbc", ".stablehlo", ".jax"), is_intact=_is_mlir,
        classes=("flax.linen.module.Module", "flax.nnx.module.Module", "jax._src.export._export.Exported"),
        claims=_is_function_or_bytecode, rank=-1,  # networks of other frameworks are callable as well
    ),
    Frontend(
        "keras", "models of Keras", "tvm_split.frontends.keras.load:load_keras",
        packages=("keras",), suffixes=(".keras",), is_intact=_is_archive, classes=("keras.src.models.model.Model",),
        rank=1,  # with the torch backend, models of Keras are torch modules as well
    ),
    Frontend(
        "tensorflow", "TensorFlow's SavedModels", "tvm_split.frontends.tensorflow:load_tensorflow",
        packages=("tensorflow", "jax"),
        claims=lambda source: isinstance(source, str | Path) and (Path(source) / "saved_model.pb").is_file(),
    ),
    Frontend(
        "tflite", "TFLite files", "tvm_split.frontends.tflite.load:load_tflite",
        packages=("tflite", "ai_edge_litert"), suffixes=(".tflite",),
        claims=lambda source: _is_bytes(source) and bytes(source[4:8]) == _TFLITE,
    ),
)  # fmt: skip

FRONTENDS: Registry[Frontend] = Registry(
    "tvm_split.frontends",
    "frontend",
    {each.name: each for each in _TABLE},
    Frontend,
    ModelImportError,
    instances=True,
)
"""All frontends by name; installed packages add theirs by entry points of the group ``tvm_split.frontends``."""


def file_suffixes() -> tuple[str, ...]:
    """The suffixes of all files that can be imported."""
    return tuple(dict.fromkeys(suffix for _, frontend in FRONTENDS.items() for suffix in frontend.suffixes))


def is_network(value: Any) -> bool:
    """Whether a value is itself an object of a framework, and not a function that returns one."""
    return any(frontend.has_class_of(value) for _, frontend in FRONTENDS.items())


def frontend_of(source: Any) -> Frontend:
    """Return the frontend that loads ``source``. Raises ModelImportError, which lists valid sources, if none does."""
    able = [frontend for _, frontend in FRONTENDS.items() if frontend.takes(source)]
    if able:
        return max(able, key=lambda frontend: frontend.rank)
    shown = repr(str(source)) if isinstance(source, str | Path) else _class_of(source)
    titles = ", ".join(frontend.title for _, frontend in FRONTENDS.items())
    raise ModelImportError(
        f"{shown} is no model that can be imported. Give one of these: {titles}; files end in "
        f"{', '.join(file_suffixes())}. Other files (checkpoints, TorchScript) hold no exported graph: load them in "
        "their framework and give the network"
    )


def _class_of(source: Any) -> str:
    return f"a {type(source).__module__}.{type(source).__qualname__}"
