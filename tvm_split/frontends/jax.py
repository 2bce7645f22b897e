"""Load functions of JAX, modules of Flax, artefacts of ``jax.export``, and StableHLO files as Models."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export, tree_util
from jax.extend import core

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, NoExamplesError, class_and_first_line, last_line
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.building import with_output_names
from tvm_split.frontends.convert import line_of_source
from tvm_split.frontends.dimensions import as_arguments, bound_inputs, with_rows
from tvm_split.frontends.names import UniqueNames, identifier, output_names
from tvm_split.frontends.stablehlo.importer import model_of
from tvm_split.frontends.stablehlo.layer_names import Naming, as_they_are, below_the_network
from tvm_split.frontends.stablehlo.modules import (
    block_of,
    main_of,
    parsed,
    shape_and_dtype,
    with_sizes,
)
from tvm_split.model import Model
from tvm_split.units import short_list

_CHOICE_REMEDY = (
    ". It chooses by the values of an array: write that line with jax.numpy.where, or give the part of the network "
    "before or after it"
)
EXPORTED_SUFFIX = ".jax"
"""The suffix for files of ``jax.export.Exported.serialize``; JAX itself defines none."""


def load_jax(source: Any, request: ImportRequest) -> Model:
    """Return a Model of a function or Flax module (with example inputs), an exported function, or a StableHLO module.

    ``example_inputs`` is a tuple of positional arguments, a dict of keyword arguments, or one array. Arguments may be
    nested as JAX's pytrees; ``Model.inputs`` and ``Model.outputs`` are flat, in JAX's order. Arrays in a function's
    closure, or bound by ``functools.partial``, are weights. Raises ModelImportError.
    """
    if isinstance(source, str | Path):
        request = replace(request, name=request.name or Path(source).stem)
        source = _read(Path(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _load_module(bytes(source), request, request.name or "model")
    if isinstance(source, export.Exported):
        return _load_module(source, request, request.name or source.fun_name)
    if request.dimensions:
        raise ModelImportError(
            "dimensions are for exported functions and StableHLO modules; the sizes of a function are those of its "
            f"example_inputs, so give inputs of the wanted sizes instead of dimensions={dict(request.dimensions)}"
        )
    return _load_function(source, request)


def _read(path: Path) -> Any:
    content = path.read_bytes()
    if path.suffix.lower() == EXPORTED_SUFFIX:
        try:
            return export.deserialize(bytearray(content))
        except Exception as error:
            raise ModelImportError(
                f"{str(path)!r} cannot be read as a function serialised by jax.export: {last_line(error)}"
            ) from error
    return content


def _load_function(source: Any, request: ImportRequest) -> Model:
    shown = getattr(source, "__name__", type(source).__name__)
    if request.example_inputs is None:
        raise NoExamplesError(f"{shown} is a function of JAX")
    function = function_of(source)
    positional, keywords = as_arguments(request.example_inputs)
    leaves, tree = tree_util.tree_flatten((positional, keywords))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    arrays = [np.asarray(leaf) for leaf, is_one in zip(leaves, is_array, strict=True) if is_one]
    arrays = with_rows(arrays, request.batch)
    names = [name for name, is_one in zip(_names(source, positional, keywords), is_array, strict=True) if is_one]

    paths: list[Any] = []

    def on_arrays(*inputs: Any) -> Any:
        waiting = iter(inputs)
        mixed = [next(waiting) if is_one else leaf for leaf, is_one in zip(leaves, is_array, strict=True)]
        positional, keywords = tree_util.tree_unflatten(tree, mixed)
        outputs = tree_util.tree_leaves_with_path(function.call(*positional, **keywords))
        paths[:] = [path for path, _ in outputs]
        return [leaf for _, leaf in outputs]

    model = traced_model(
        on_arrays, arrays, names, framework="jax", name=request.name or function.name or shown, naming=function.naming
    )
    return with_output_names(model, output_names(paths))


def traced_model(
    call: Callable[..., Any],
    arrays: Sequence[Array],
    names: Sequence[str],
    *,
    framework: str,
    name: str,
    naming: Naming = as_they_are,
) -> Model:
    """Trace ``call``, which takes ``arrays`` with these ``names`` and returns a list of arrays, and return its Model.

    ``naming`` converts paths of operations to names of layers.
    """
    module, weights = _lowered(call, arrays, name)
    places = range(len(weights), len(weights) + len(arrays))
    kinds = [shape_and_dtype(block_of(main_of(module)).arguments[place].type)[1] for place in places]
    examples = [array.astype(np.dtype(kind)) for array, kind in zip(arrays, kinds, strict=True)]
    unique = UniqueNames()
    inputs = {place: unique.take(argument_name) for place, argument_name in zip(places, names, strict=True)}
    weights_by_place = dict(enumerate(weights))
    return model_of(module, weights_by_place, inputs, examples, framework=framework, name=name, naming=naming)


def _lowered(call: Callable[..., Any], arrays: Sequence[Array], shown: str) -> tuple[Any, list[Array]]:
    """Return ``call`` as a StableHLO module, and the arrays of its closure, which are the first arguments."""
    try:
        closed = jax.make_jaxpr(call)(*arrays)
    except ModelImportError:
        raise
    except Exception as error:
        inputs = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        remedy = _CHOICE_REMEDY if isinstance(error, jax.errors.ConcretizationTypeError) else ""
        reason = f"{class_and_first_line(error)}{line_of_source(error)}{remedy}"
        raise ModelImportError(f"JAX cannot trace {shown} for inputs {inputs}: {reason}") from error

    def with_weights(weights: Sequence[Any], *arguments: Any) -> Any:
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, weights))(*arguments)

    lowered = jax.jit(with_weights, keep_unused=True).trace(closed.consts, *arrays).lower(lowering_platforms=("cpu",))
    weights = [np.asarray(weight) for weight in closed.consts]
    return parsed(lowered.as_text(debug_info=True), shown), weights


def _names(source: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> list[str]:
    """Name each leaf of the arguments by its parameter and the keys below it."""
    try:
        named = dict(inspect.signature(source).bind_partial(*positional).arguments)
    except (TypeError, ValueError):
        named = {f"input_{place}": value for place, value in enumerate(positional)}
    named |= {key: keywords[key] for key in sorted(keywords)}
    return [
        identifier(key + tree_util.keystr(path))
        for key, value in named.items()
        for path, _ in tree_util.tree_leaves_with_path(value)
    ]


def _load_module(source: Any, request: ImportRequest, name: str) -> Model:
    """Load an Exported or the bytes of a module; all arguments of its main function become inputs."""
    names: list[str] = []
    symbols: list[tuple[int | str | None, ...]] = []
    paths: list[Any] = []
    if isinstance(source, bytes):
        module = parsed(source, "the module")
    else:
        module = parsed(source.mlir_module_serialized, f"the exported function {source.fun_name!r}")
        symbols = [
            tuple(size if isinstance(size, int) else str(size) for size in aval.shape) for aval in source.in_avals
        ]
        positional, keywords = tree_util.tree_unflatten(source.in_tree, list(range(len(source.in_avals))))
        names = _names(None, positional, keywords)
        outputs = tree_util.tree_unflatten(source.out_tree, range(len(source.out_avals)))
        paths = [path for path, _ in tree_util.tree_leaves_with_path(outputs)]
    arguments = list(block_of(main_of(module)).arguments)
    names = names or [f"input_{place}" for place in range(len(arguments))]
    kinds = [shape_and_dtype(argument.type) for argument in arguments]
    shapes = symbols or [shape for shape, _ in kinds]
    specs = [(called, shape, dtype) for called, shape, (_, dtype) in zip(names, shapes, kinds, strict=True)]
    example_inputs = request.example_inputs
    if example_inputs is not None and not isinstance(example_inputs, Mapping):
        request = replace(request, example_inputs=tree_util.tree_leaves(example_inputs))
    static, examples = bound_inputs(specs, request)
    module = with_sizes(module, static)
    model = model_of(module, {}, dict(enumerate(names)), examples, framework="stablehlo", name=name)
    return with_output_names(model, output_names(paths)) if paths else model


@dataclass(frozen=True)
class Function:
    """A function to trace, its name ("": the caller chooses), and the naming that converts paths to layers."""

    call: Callable[..., Any]
    name: str = ""
    naming: Naming = as_they_are


def function_of(source: Any) -> Function:
    """Return the function for a source: a function, a module of flax.nnx, or a bound module of flax.linen.

    Raises ModelImportError for unbound modules and modules in training mode.
    """
    # Flax is not imported here: a module of Flax has already imported it.
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(source, linen.Module):
        if source.scope is None:
            raise ModelImportError(
                f"{type(source).__name__} is a module of flax.linen without its variables: give "
                "module.bind(variables), or functools.partial(module.apply, variables)"
            )
        module, variables = source.unbind()
        # linen names a network's own scope after its class.
        return Function(functools.partial(module.apply, variables), type(module).__name__, below_the_network)
    if nnx is not None and isinstance(source, nnx.Module):
        _check_evaluation_mode(source, nnx)
        return Function(_nnx_function(source, nnx), type(source).__name__)
    return Function(source)


def _check_evaluation_mode(module: Any, nnx: Any) -> None:
    training = [
        "/".join(map(str, path)) or type(part).__name__
        for path, part in nnx.iter_modules(module)
        if getattr(part, "use_running_average", True) is False
        or (getattr(part, "deterministic", True) is False and _drops(part))
    ]
    if training:
        raise ModelImportError(
            f"{type(module).__name__} is in training mode, which changes what these layers compute: "
            f"{short_list(training)}. Call model.eval() first"
        )


def _drops(part: Any) -> bool:
    return any(getattr(part, name, None) for name in ("rate", "dropout_rate"))


def _nnx_function(module: Any, nnx: Any) -> Callable[..., Any]:
    graph, state = nnx.split(module)

    def call(*arguments: Any, **keywords: Any) -> Any:
        # Each trace gets its own copy, since it may write to counters and statistics.
        module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
        paths = {id(part): path for path, part in nnx.iter_modules(module)}
        before = _values(nnx.state(module))
        with _naming(paths, {type(part) for _, part in nnx.iter_modules(module)}):
            result = module(*arguments, **keywords)
        after = _values(nnx.state(module))
        changed = [path for path, value in before.items() if path in after and after[path] is not value]
        if changed:
            raise ModelImportError(
                f"{type(module).__name__} changes {short_list(changed)} in every call; a split network keeps no state "
                "between calls. Make the state an input and an output of the network"
            )
        return result

    return call


def _values(state: Any) -> dict[str, Any]:
    return {
        tree_util.keystr(path[:-1], simple=True, separator="/"): value  # without the key within a Variable
        for path, value in tree_util.tree_leaves_with_path(state)
    }


@contextmanager
def _naming(paths: dict[int, tuple[Any, ...]], classes: set[type]) -> Iterator[None]:
    """Patch the modules' classes inside the block: each call runs in JAX scopes named by the module's path."""
    around: list[tuple[Any, ...]] = [()]

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def scoped(self: Any, *arguments: Any, **keywords: Any) -> Any:
            path = paths.get(id(self), ())
            outer = around[-1]
            within = path[len(outer) :] if path[: len(outer)] == outer else path
            with ExitStack() as scopes:
                for word in within:
                    scopes.enter_context(jax.named_scope(str(word)))
                around.append(path)
                try:
                    return call(self, *arguments, **keywords)
                finally:
                    around.pop()

        return scoped

    methods = {cls: cls.__dict__["__call__"] for cls in classes for cls in cls.__mro__ if "__call__" in cls.__dict__}
    try:
        for cls, call in methods.items():
            type.__setattr__(cls, "__call__", named(call))
        yield
    finally:
        for cls, call in methods.items():
            type.__setattr__(cls, "__call__", call)
