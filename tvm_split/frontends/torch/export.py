"""Export torch modules and functions (errors name the user's line), find what state they keep, and run them."""

import dis
import inspect
import io
import logging
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tvm_split.errors import ModelImportError, class_and_first_line
from tvm_split.frontends.convert import line_of_source
from tvm_split.frontends.torch.graph import held_tensors, user_inputs, user_outputs
from tvm_split.frontends.torch.tensors import dtype_name, shown, to_numpy, to_torch
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

    ``only_part`` is the name of the part, which layer names leave out, if there is exactly one; else it is empty.
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
    """Return the modules that a function uses, by name: its own, or those in its object, closure and globals."""
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
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelImportError(f"{name} is TorchScript, which torch.export refuses; give the module it was made of")
    _check_evaluation_mode(module, name)
    _check_not_quantized(module)
    positional, keyword = arguments
    try:
        with torch.no_grad(), _quiet(), watched(module) as changed:
            program = torch.export.export(module, positional, keyword or None)
    except ModelImportError:
        raise
    except Exception as error:
        reason = _reason(error, partial(module, *positional, **keyword))
        inputs = ", ".join(map(shown, pytree.tree_leaves(arguments)))
        raise ModelImportError(f"torch.export cannot export {name} for inputs {inputs}: {reason}") from error
    with torch.no_grad(), _quiet():
        states = state_of(module, arguments) if changed else []
    if states:
        raise ModelImportError(
            f"{name} reads {short_list(states)} and assigns it in every call; a split network keeps no state between "
            "calls. Make it an input and an output of the model"
        )
    return program


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
                    "torch.ao, which torch.export cannot export: give the network of floats, or quantize it by "
                    "torchao's pt2e, or the exported ONNX or TFLite file"
                )


@dataclass(frozen=True)
class TorchReference:
    """Run ``source`` (the user's module or the exported program) for outputs, and the decomposed graph for values.

    ``arguments_of`` converts flat tensors to the arguments of ``source``. ``variables`` maps nodes to variables.
    """

    source: Callable[..., Any]
    arguments_of: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    program: ExportedProgram
    variables: Mapping[fx.Node, str]

    def outputs(self, inputs: Sequence[np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], ...]:
        """The model's outputs, flattened in torch's pytree order; shapes and dtypes as in ``Model.outputs``."""
        positional, keyword = self.arguments_of([to_torch(array) for array in inputs])
        with torch.no_grad(), _exported_path():
            result = self.source(*positional, **keyword)
        return tuple(to_numpy(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))

    def values(self, inputs: Sequence[np.ndarray[Any, Any]]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield the variable name and the value of every tensor of the decomposed graph, in execution order."""
        with torch.no_grad():
            for node, value in _results(self.program, [to_torch(array) for array in inputs]):
                if node in self.variables:
                    yield self.variables[node], to_numpy(value)

    def precise(self, inputs: Sequence[np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], ...]:
        """The outputs with float64 instead of float32."""
        outputs = user_outputs(self.program)
        with torch.no_grad():
            results = _results(self.program, [to_torch(array) for array in inputs], _to_double)
            values = {node: value for node, value in results if node in outputs}
        return tuple(to_numpy(values[node]) for node in outputs)


@contextmanager
def _exported_path() -> Iterator[None]:
    """Disable torch's fast path of attention: for a fully masked row it returns NaN, the exported path 0."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _to_double(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.double() if leaf.dtype is torch.float32 else leaf
    return torch.float64 if leaf is torch.float32 else leaf


def _results(
    program: ExportedProgram, inputs: Sequence[torch.Tensor], convert: Callable[[Any], Any] = lambda leaf: leaf
) -> Iterator[tuple[fx.Node, Any]]:
    """Yield every call of the graph with its result; results are dropped after their last use.

    ``convert`` is applied to all tensors and arguments before the calls.
    """
    held = held_tensors(program) | dict(zip(user_inputs(program), inputs, strict=True))
    values: dict[fx.Node, Any] = {node: convert(value) for node, value in held.items()}

    def argument(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, fx.Node) else convert(leaf)

    last_use = {source: node for node in program.graph.nodes for source in node.all_input_nodes}
    for node in program.graph.nodes:
        if node.op == "call_function":
            arguments, keywords = pytree.tree_map(argument, (tuple(node.args), dict(node.kwargs)))
            values[node] = node.target(*arguments, **keywords)
            yield node, values[node]
            for source in node.all_input_nodes:
                if last_use.get(source) is node:
                    values.pop(source, None)


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_OF_TORCH = ("_parameters.", "_buffers.", "_modules.")
"""Containers of modules in which torch.export itself observes tensors."""
_OF_OTHERS = {*sys.stdlib_module_names, "torch", "numpy"}
"""Packages whose objects and classes hold no state of the user's network."""


class _Snapshot:
    """What the attributes of a module's parts and their classes hold now, with nested containers and objects."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(path, container, _entries(container)) for path, container in _containers(module)]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are neither parameters nor buffers."""
        values = [value for path, _, old in self._held if not path.endswith(_OF_TORCH) for value in old.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]

    def changes(self) -> list[tuple[str, Any, Any]]:
        """The path, container and key of each entry that was added, changed or removed since the snapshot."""
        return [
            (f"{path}{key}", container, key)
            for path, container, old in self._held
            for key in _changed(container, old)
            if not (path.endswith(_OF_TORCH) and isinstance(old.get(key), torch.Tensor))
        ]

    def restore(self) -> None:
        for _, container, old in self._held:
            changed = _changed(container, old)
            if isinstance(container, type):
                for key in changed:
                    setattr(container, key, old[key]) if key in old else delattr(container, key)
            elif changed:
                container.clear()
                add = getattr(container, "extend", None) or container.update
                add(old if isinstance(container, dict) else old.values())


def _entries(container: Any) -> dict[Any, Any]:
    items = vars(container) if isinstance(container, type) else container
    return dict(items if hasattr(items, "items") else enumerate(items))


def _changed(container: Any, old: dict[Any, Any]) -> list[Any]:
    now = _entries(container)
    return [key for key in {**old, **now} if now.get(key, now) is not old.get(key, old)]


def _containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the containers and classes in which a module's parts, and their hooks, can keep state, with their paths."""
    waiting: list[tuple[str, Any]] = [(f"{path}." if path else "", part) for path, part in module.named_modules()]
    seen: dict[int, Any] = {}
    while waiting:
        path, value = waiting.pop()
        if seen.setdefault(id(value), path) is not path:
            continue
        if isinstance(value, MethodType):
            waiting.append((path, value.__self__))
        elif isinstance(value, FunctionType) and _is_users(value):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            waiting += [(f"{path}{name}.", cell.cell_contents) for name, cell in cells]
        elif type(value) in _CONTAINERS or isinstance(value, tuple | type):
            waiting += [(f"{path}{key}.", entry) for key, entry in _entries(value).items()]
            if not isinstance(value, tuple):
                yield path, value
        elif hasattr(value, "__dict__") and (isinstance(value, nn.Module) or _is_users(type(value))):
            waiting += [(path, vars(value)), *((path, kind) for kind in type(value).__mro__ if _is_users(kind))]


def _is_users(kind: type | FunctionType) -> bool:
    module = kind.__module__ or ""  # a function that was made of text has none
    return module.partition(".")[0] not in _OF_OTHERS


class _Unreadable(torch.Tensor):  # type: ignore[misc]
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a call reads what an earlier one has written")


@contextmanager
def _restored(module: nn.Module, buffers: list[torch.Tensor]) -> Iterator[_Snapshot]:
    """Restore the module's attributes and the values of its tensors after the block; yields a snapshot of them."""
    snapshot = _Snapshot(module)
    tensors = [tensor for tensor in (*buffers, *snapshot.tensors()) if not tensor.is_inference()]
    values = [(tensor, tensor._version, tensor.clone()) for tensor in tensors]
    try:
        yield snapshot
    finally:
        snapshot.restore()
        for tensor, version, value in values:
            if tensor._version != version:
                tensor.copy_(value)


@contextmanager
def watched(module: nn.Module) -> Iterator[set[str]]:
    """Restore the module's attributes after the block; yields the set of attributes that calls inside it change."""
    calls: list[_Snapshot] = []
    changed: set[str] = set()
    kinds = {kind.__module__.partition(".")[0] for part in module.modules() for kind in type(part).__mro__}
    if "keras" in kinds:  # the importer of Keras networks checks their state, and Keras tracks its own containers
        yield changed
        return
    with _restored(module, []):
        module.register_forward_pre_hook(lambda *_: calls.append(_Snapshot(module)), prepend=True)
        module.register_forward_hook(lambda *_: changed.update(path for path, *_ in calls.pop().changes()))
        yield changed


def state_of(module: nn.Module, arguments: Any) -> list[str]:
    """Return the attributes from which a call may read what an earlier call has written.

    Attributes that the second of two calls with other inputs changes are made unreadable, and the next call has to
    give the same outputs as a first call. So attributes that are only written, or filled once with values that do not
    depend on the inputs, are not state.
    """

    def run(change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> list[Any]:
        positional, keyword = pytree.tree_map_only(torch.Tensor, change, arguments)
        return list(pytree.tree_leaves(module(*positional, **keyword)))

    with _restored(module, list(module.buffers())) as first:
        changes: list[Any] = []
        try:
            expected = run()
            changes = first.changes()
            first.restore()
            run(_with_other_values)
            second = _Snapshot(module)
            run(_with_other_values)
            changes = second.changes() or changes
            for _, container, key in second.changes():
                put = setattr if isinstance(container, type) else type(container).__setitem__
                put(container, key, _Unreadable())
            torch.testing.assert_close(run(), expected, equal_nan=True)
            return []
        except Exception:
            return [path for path, *_ in changes]


def _with_other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of other values, which are valid indices if those of ``tensor`` are."""
    flipped = tensor.flip(list(range(tensor.dim())))
    return flipped + 1 if tensor.is_floating_point() else flipped
