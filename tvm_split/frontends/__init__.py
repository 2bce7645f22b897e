"""Import trained networks of several frameworks as ``tvm_split.model.Model``.

The table of frontends has the sources, packages and loader of each; it imports no framework.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relay_passes.one_at_a_time import ONE_AT_A_TIME
from rpc_runtime.registry import PluginError, Registry
from tvm_split.errors import ModelImportError, NoExamplesError, required
from tvm_split.frontends.files import require_model_file
from tvm_split.parameters import Size
from tvm_split.progress import step_progress

if TYPE_CHECKING:
    from tvm_split.model import Model

__all__ = ["FRONTENDS", "Frontend", "ImportRequest", "load_model"]

MOST_LEAVES = 1 << 22
"""The most values in nested example inputs; frameworks take about a microsecond for each."""


@dataclass(frozen=True)
class ImportRequest:
    """The arguments of `load_model` besides the source; its docstring explains each."""

    example_inputs: Any = None
    batch: int | None = None
    dimensions: Mapping[str, int] = field(default_factory=dict)
    name: str | None = None


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
        tensors: full names of classes of its tensors; it takes functions of them, and methods of its sources.
        claims: whether it takes a source without such a suffix or class: bytes, folders, functions.
        rank: if several frontends take a source, the one with the highest rank loads it.
    """

    name: str
    title: str
    load: str
    packages: tuple[str, ...] = ()
    install: str = ""
    suffixes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    claims: Callable[[Any], bool] = lambda source: False
    rank: int = 0

    def takes(self, source: Any, example_inputs: Any = None) -> bool:
        """Whether this frontend can load ``source``."""
        is_file = isinstance(source, str | Path) and Path(source).suffix.lower() in self.suffixes
        is_function = _is_function(source) and (
            self.has_class_of(getattr(source, "__self__", None))
            or any(_has_class(leaf, self.tensors) for leaf in _leaves(example_inputs))
        )
        return is_file or is_function or self.has_class_of(source) or self.claims(source)

    def has_class_of(self, source: Any) -> bool:
        """Whether ``source`` is an object of the framework: a network, or its exported form."""
        return _has_class(source, self.classes)


def _has_class(value: Any, names: tuple[str, ...]) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" in names for base in type(value).__mro__)


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and mappings."""
    if not isinstance(values, list | tuple | Mapping):
        yield values
        return
    for part in values.values() if isinstance(values, Mapping) else values:
        yield from _leaves(part)


def _count_leaves(values: Any, counts: dict[int, int]) -> int:
    """Return the number of values and empty containers in nested lists, tuples and mappings.

    ``counts`` has those of containers by id, so that a container that many others hold is walked once.
    """
    if not isinstance(values, list | tuple | Mapping):
        return 1
    if id(values) not in counts:
        parts = values.values() if isinstance(values, Mapping) else values
        counts[id(values)] = sum(_count_leaves(part, counts) for part in parts) or 1
    return counts[id(values)]


_TFLITE = b"TFL3"
_MLIR_BYTECODE = b"ML\xefR"


def _is_function(source: Any) -> bool:
    return callable(source) and not isinstance(source, type)


def _is_bytes(source: Any) -> bool:
    return isinstance(source, bytes | bytearray | memoryview)


def _is_function_or_bytecode(source: Any) -> bool:
    if _is_bytes(source):
        return bytes(source[:4]) == _MLIR_BYTECODE
    return _is_function(source)


_TABLE = (
    Frontend(
        "torch", "models of PyTorch", "tvm_split.frontends.torch.load:load_torch",
        packages=("torch",), suffixes=(".pt2",),
        classes=("torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram"),
        tensors=("torch.Tensor",),
    ),
    Frontend(
        "onnx", "models in ONNX files", "tvm_split.frontends.onnx.load:load_onnx",
        packages=("onnx",), suffixes=(".onnx",), classes=("onnx.onnx_ml_pb2.ModelProto",),
        claims=_is_bytes, rank=-2,  # takes bytes that no other frontend takes
    ),
    Frontend(
        "jax", "models of JAX and Flax, and StableHLO files", "tvm_split.frontends.jax:load_jax",
        packages=("jax",), suffixes=(".mlir", ".mlirbc", ".stablehlo", ".jax"),
        classes=("flax.linen.module.Module", "flax.nnx.module.Module", "jax._src.export._export.Exported"),
        claims=_is_function_or_bytecode, rank=-1,  # networks of other frameworks are callable as well
    ),
    Frontend(
        "keras", "models of Keras", "tvm_split.frontends.keras:load_keras",
        packages=("keras",), suffixes=(".keras",), classes=("keras.src.models.model.Model",),
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
    {frontend.name: frontend for frontend in _TABLE},
    Frontend,
    ModelImportError,
    instances=True,
)
"""All frontends by name; installed packages add theirs by entry points of the group ``tvm_split.frontends``."""


def file_suffixes() -> tuple[str, ...]:
    return tuple(dict.fromkeys(suffix for _, frontend in FRONTENDS.items() for suffix in frontend.suffixes))


def is_network(value: Any) -> bool:
    """Whether a value is itself an object of a framework, and not a function that returns one."""
    return any(frontend.has_class_of(value) for _, frontend in FRONTENDS.items())


def frontend_of(source: Any, example_inputs: Any = None) -> Frontend:
    """Return the frontend that loads ``source``. Raises ModelImportError, which lists valid sources, if none does."""
    able = [frontend for _, frontend in FRONTENDS.items() if frontend.takes(source, example_inputs)]
    if able:
        return max(able, key=lambda frontend: frontend.rank)
    kind = type(source)
    shown = repr(str(source)) if isinstance(source, str | Path) else f"a {kind.__module__}.{kind.__qualname__}"
    titles = ", ".join(frontend.title for _, frontend in FRONTENDS.items())
    raise ModelImportError(
        f"{shown} is not a model that can be imported. Give one of these: {titles}; files end in "
        f"{', '.join(file_suffixes())}. Other files (checkpoints, TorchScript) hold no exported graph: load them in "
        "their framework and give the network"
    )


def load_model(
    source: Any,
    example_inputs: Any = None,
    *,
    batch: Size | None = None,
    dimensions: Mapping[str, Size] | None = None,
    name: str | None = None,
) -> Model:
    """Import a trained network as a Model.

    ``source`` is one of these; installed packages may add others:

    - torch: an ``nn.Module``, a function of tensors or a module's method (these need ``example_inputs``), an
      ``ExportedProgram``, or the path of one (``.pt2``)
    - ONNX: a path, bytes or a ``ModelProto``
    - JAX: a function or a module of Flax (needs ``example_inputs``), or the result of ``jax.export`` (``.jax``)
    - StableHLO: a file (``.mlir`` as text or bytecode, ``.mlirbc``)
    - Keras: a model or its ``.keras`` file; TFLite: a ``.tflite`` file or its bytes; TensorFlow: a SavedModel folder
    - a Model, which is returned unchanged

    ``example_inputs`` is a tuple of tensors or arrays, a single one, or a dict by name. ``batch`` binds an open first
    axis, ``dimensions`` binds open sizes by name, and the other open sizes come from ``example_inputs``. ``name`` is
    the name of the Model. One network is imported at a time; other threads wait. Not thread-safe otherwise: meanwhile
    no other thread may call layers of the same framework, since classes of nnx and Keras are patched.

    Raises:
        ModelImportError: the file is unreadable, the kind of source is unknown, the framework is not installed,
            operators cannot be imported (named with their layers), sizes are open, or examples do not fit.
    """
    from tvm_split.model import Model  # imported here: it loads TVM, which the table of frontends does not need

    if isinstance(source, Model):
        return source
    _require_countable(example_inputs)
    request = ImportRequest(example_inputs, batch, dict(dimensions or {}), name)
    if example_inputs is None and _is_function(source) and not is_network(source):
        raise NoExamplesError(f"{getattr(source, '__name__', type(source).__name__)} is a function")
    frontend = frontend_of(source, example_inputs)
    if isinstance(source, str | Path) and Path(source).suffix.lower() in frontend.suffixes:
        require_model_file(Path(source))
    install = frontend.install or f"tvm-split[{frontend.name}]"
    for package in frontend.packages:
        if importlib.util.find_spec(package) is None:
            raise ModelImportError(f"this model needs {package}, which is not installed: pip install {install}")
    module, _, function = frontend.load.partition(":")
    shown = name or (Path(source).name if isinstance(source, str | Path) else type(source).__name__)
    with step_progress(f"importing {shown}"), ONE_AT_A_TIME:
        model = getattr(importlib.import_module(module), function)(source, request)
    return required(Model, model, PluginError, f"frontend {frontend.name!r} returned it; update its package")


def _require_countable(example_inputs: Any) -> None:
    try:
        count = _count_leaves(example_inputs, {})
    except RecursionError:
        raise ModelImportError("example_inputs hold themselves, or are nested too deep; give arrays") from None
    if count > MOST_LEAVES:
        raise ModelImportError(
            f"example_inputs hold {count} values in nested lists, the limit is {MOST_LEAVES}; give arrays"
        )
