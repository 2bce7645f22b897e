"""Load models of Keras and ``.keras`` files as Models, through Keras's backend: JAX or torch."""

import functools
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tvm_split.errors import ModelImportError, NoExamplesError, last_line
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.building import with_output_names
from tvm_split.frontends.dimensions import Specs, bound_inputs, in_order, with_rows
from tvm_split.frontends.names import identifier, output_names, paths_in
from tvm_split.model import Model
from tvm_split.units import short_list

BACKENDS = ("jax", "torch")
"""The backends of Keras that can be imported; the first installed one is the default."""


def load_keras(source: Any, request: ImportRequest) -> Model:
    """Return a Model of a Keras model or a ``.keras`` file; layers have their names in Keras (``block/conv``).

    ``example_inputs`` is a tuple of arrays, one array, or a dict by the names of the inputs. It is optional for models
    that know their inputs' shapes. Raises ModelImportError.
    """
    if isinstance(source, str | Path):
        source = _read(Path(source))
    import keras

    backend = keras.config.backend()
    if backend not in BACKENDS:
        raise ModelImportError(
            f"Keras computes with {backend} here; its models are imported with {' or '.join(BACKENDS)}. Save the model "
            f"as a .keras file, and load that where KERAS_BACKEND={BACKENDS[0]} is set"
        )
    names, arrays = _inputs(source, request)
    structure = getattr(source, "_inputs_struct", None)
    takes_names = structure is None and not _known_inputs(source) and isinstance(request.example_inputs, Mapping)
    called = request.name or source.name
    paths: list[Any] = []

    def call(*tensors: Any) -> list[Any]:
        argument: Any = list(tensors) if len(tensors) > 1 else tensors[0]
        if takes_names:
            argument = dict(zip(names, tensors, strict=True))
        elif structure is not None:
            argument = keras.tree.pack_sequence_as(structure, list(tensors))
        with keras.StatelessScope() as scope:  # the user's model keeps its variables
            result = source(argument, training=False)
        _refuse_state(source, scope)
        outputs = keras.tree.flatten_with_path(result)
        paths[:] = [path for path, _ in outputs]
        return [output for _, output in outputs]

    if not source.built:
        call(*(keras.KerasTensor(array.shape, str(array.dtype)) for array in arrays))
    identifiers = [identifier(input_name) for input_name in names]
    if backend == "torch":
        model = _through_torch(call, source, arrays, identifiers, called)
    else:
        from tvm_split.frontends.jax import traced_model
        from tvm_split.frontends.stablehlo.layer_names import below_the_network

        model = traced_model(call, arrays, identifiers, framework="keras", name=called, naming=below_the_network)
    model = with_output_names(model, _output_names(source, paths))
    return model if request.example_inputs is not None else replace(model, example_inputs=None)


def _refuse_state(model: Any, scope: Any) -> None:
    """Raise ModelImportError if a call assigned variables: recurrent states, seeds, statistics, counters."""
    if not scope.state_mapping:
        return
    changing = [
        layer.path.removeprefix(f"{model.name}/")
        for layer in model._flatten_layers()
        for held, _ in paths_in(vars(layer))
        if id(getattr(held, "state", held)) in scope.state_mapping  # a seed generator has its variable in `state`
    ]
    raise ModelImportError(
        f"the Keras model {model.name!r} changes variables of {short_list(list(dict.fromkeys(changing))) or 'its own'} "
        "in every call; a split network keeps no state between calls. Build these layers without state "
        "(stateful=False, not in training), or make the state an input and an output"
    )


def _output_names(model: Any, paths: Sequence[Any]) -> list[str]:
    """Return the outputs' names: keys of a dict, else the model's ``output_names``, those of its last layers."""
    declared = list(getattr(model, "output_names", None) or ())
    has_keys = any(isinstance(key, str) for path in paths for key in path)
    return declared if len(declared) == len(paths) and not has_keys else output_names(paths)


def _read(path: Path) -> Any:
    if "keras" not in sys.modules and "KERAS_BACKEND" not in os.environ:
        backend = next((backend for backend in BACKENDS if importlib.util.find_spec(backend)), None)
        if backend is None:
            raise ModelImportError(
                f"{str(path)!r}: Keras needs something to compute with: pip install tvm-split[{BACKENDS[0]}] or "
                f"tvm-split[{BACKENDS[1]}]"
            )
        os.environ["KERAS_BACKEND"] = backend
    try:
        import keras
    except Exception as error:  # a missing backend raises an error of its own
        setting = os.environ.get("KERAS_BACKEND") or "what its keras.json says"
        raise ModelImportError(
            f"{str(path)!r}: Keras cannot be imported with {setting} to compute with (KERAS_BACKEND, which may be "
            f"{' or '.join(BACKENDS)}): {last_line(error)}"
        ) from error
    try:
        return keras.saving.load_model(str(path), compile=False)
    except Exception as error:
        raise ModelImportError(f"{str(path)!r} cannot be read as a model of Keras: {last_line(error)}") from error


def _inputs(model: Any, request: ImportRequest) -> tuple[list[str], list[np.ndarray[Any, Any]]]:
    """Return the inputs' names and an array for each."""
    import keras

    examples = request.example_inputs
    specs = _known_inputs(model)
    names = [name for name, _, _ in specs]
    if examples is not None:
        inputs = examples if isinstance(examples, Mapping | list | tuple) else [examples]
        if not names:
            names = list(inputs) if isinstance(inputs, Mapping) else [f"input_{place}" for place in range(len(inputs))]
        arrays = [np.asarray(keras.ops.convert_to_numpy(value)) for value in in_order(names, inputs)]
    elif not specs:
        raise NoExamplesError(f"the Keras model {model.name!r} does not know its inputs' shapes")
    if examples is not None and request.dimensions:
        raise ModelImportError(
            "dimensions and example_inputs both say the sizes of the inputs; give one of them, and batch if need be"
        )
    if not specs:
        return names, with_rows(arrays, request.batch)
    if examples is not None:
        arrays = [array.astype(dtype) for array, (_, _, dtype) in zip(arrays, specs, strict=True)]
        request = replace(request, example_inputs=with_rows(arrays, request.batch), batch=None)
    shapes, fitting = bound_inputs(specs, request)
    return names, fitting or [np.zeros(shape, dtype) for shape, (_, _, dtype) in zip(shapes, specs, strict=True)]


def _known_inputs(model: Any) -> Specs:
    """Name, shape and dtype of each input if the model declares them; inputs in a dict are named by their keys."""
    import keras

    try:
        tensors = list(model.inputs or ())
    except AttributeError:
        return ()
    names = [tensor.name for tensor in tensors]
    structure = getattr(model, "_inputs_struct", None)
    if isinstance(structure, Mapping) and len(structure) == len(tensors):
        names = [str(path[-1]) for path, _ in keras.tree.flatten_with_path(structure)]
    # All inputs of a Keras network have the same batch size.
    shapes = [
        [size or ("batch" if axis == 0 else None) for axis, size in enumerate(tensor.shape)] for tensor in tensors
    ]
    return [(name, shape, str(tensor.dtype)) for name, shape, tensor in zip(names, shapes, tensors, strict=True)]


def _through_torch(
    call: Callable[..., list[Any]], model: Any, arrays: Sequence[Any], names: Sequence[str], called: str
) -> Model:
    import torch
    from torch.fx.traceback import preserve_node_meta

    from tvm_split.frontends.torch.load import load_torch
    from tvm_split.frontends.torch.tensors import to_torch

    class Network(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **tensors: Any) -> tuple[Any, ...]:
            return tuple(call(*(tensors[name] for name in names)))

    example_inputs = {name: to_torch(array) for name, array in zip(names, arrays, strict=True)}
    with _annotated(), preserve_node_meta():
        loaded = load_torch(Network().eval(), ImportRequest(example_inputs, name=called), has_channels_last=True)
    return replace(loaded, framework="keras")


@contextmanager
def _annotated() -> Iterator[None]:
    """Patch Keras inside the block: each layer call annotates torch's nodes with its path and call number."""
    import keras
    from torch.fx.traceback import annotate

    from tvm_split.frontends.torch.graph import LAYER_ANNOTATION

    original = keras.layers.Layer.__call__
    path: list[str] = []
    calls: Counter[tuple[str, ...]] = Counter()

    @functools.wraps(original)
    def annotated_call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        path.append(self.name)
        layer_path = tuple(path[1:])  # the first is the network itself
        number = calls[layer_path]
        calls[layer_path] += 1
        try:
            with annotate({LAYER_ANNOTATION: "/".join(layer_path) + (f"@{number}" if number else "")}):
                return original(self, *arguments, **keywords)
        finally:
            path.pop()

    keras.layers.Layer.__call__ = annotated_call
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = original
