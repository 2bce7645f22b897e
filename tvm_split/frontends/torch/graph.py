"""Read a lowered program: the layer of each node in the user's module tree, its tensors, its constant values."""

import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.utils import _pytree as pytree

from tvm_split.errors import ModelImportError
from tvm_split.frontends.torch.tensors import IMPORTABLE, as_numpy, require_importable

LAYER_ANNOTATION = "layer"
"""The key of ``torch.fx.traceback.annotate`` for layers of networks that are not a tree of torch modules."""


@dataclass(frozen=True)
class Lowered:
    """A static, functional graph with the signature and the tensors of the exported program that it was made of."""

    graph: fx.Graph
    graph_signature: ExportGraphSignature
    state_dict: Mapping[str, torch.Tensor]
    constants: Mapping[str, Any]


class LayerNames:
    """The names of the layers of all nodes in one exported program.

    A node inside a module without children belongs to that module (``layer1.0.conv1``); torch numbers further calls of
    the same module (``layer1.0.relu@1``). A node of a container itself is named by the container's path and the node's
    name before decomposition (``layer1.0.add_``), at the root only by that name.
    """

    def __init__(self, program: Lowered, omitted: str = "") -> None:
        """Names leave out ``omitted``, a part of the root module, as if it were the root (see `export.Called`)."""
        self._omitted = omitted
        paths = {path for node in program.graph.nodes for _, path in self._stack(node)}
        paths.update(self.shortened(target.rpartition(".")[0]) for target in program.state_dict)
        self._containers = {ancestor for path in paths for ancestor in _ancestors(path)}

    def layer_of(self, node: fx.Node) -> str:
        stack = self._stack(node)
        if not stack:
            return _name_in_source(node)
        key, path = stack[-1]
        call = key.rpartition("@")[2] if "@" in key else ""
        module = f"{path}@{call}" if call.isdigit() else path
        if path and path not in self._containers:
            return module
        between = "/" if "/" in path or LAYER_ANNOTATION in (node.meta.get("custom") or {}) else "."
        return f"{module}{between}{_name_in_source(node)}" if path else _name_in_source(node)

    def _stack(self, node: fx.Node) -> list[tuple[str, str]]:
        """The modules around a node, outermost first: pairs of torch's key (with the call's number) and path."""
        annotated = (node.meta.get("custom") or {}).get(LAYER_ANNOTATION)
        if annotated is not None:
            return [(annotated, annotated.partition("@")[0])]
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        return [(key, self.shortened(str(entry[0]))) for key, entry in stack.items() if isinstance(entry, tuple)]

    def shortened(self, path: str) -> str:
        return f"{path}.".removeprefix(f"{self._omitted}.")[:-1] if self._omitted else path


def _ancestors(path: str) -> Iterable[str]:
    while path:
        path = path[: max(path.rfind("."), path.rfind("/"), 0)]
        yield path


def _name_in_source(node: fx.Node) -> str:
    """The node's name in the graph of torch.export, before operators were decomposed."""
    sources = node.meta.get("from_node")
    return str(sources[0].name) if sources else str(node.name)


def check_no_state(program: ExportedProgram, names: LayerNames) -> None:
    """Raise ModelImportError if an output depends on a buffer that the model changes: results would vary by call."""
    signature = program.graph_signature
    written = {
        spec.target for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION and spec.target
    }
    if not written:
        return
    placeholders = {name: target for name, target in signature.inputs_to_buffers.items() if target in written}
    reaching = _nodes_before(user_outputs(program))
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in placeholders and node in reaching:
            layer = next((names.layer_of(user) for user in node.users), "?")
            raise ModelImportError(
                f"layer {layer!r} reads buffer {placeholders[node.name]!r} and the model changes it in every call; "
                "a split network keeps no state between calls. Make the buffer an input and an output of the model"
            )


def arrays_of(
    program: ExportedProgram, tensors: Mapping[fx.Node, torch.Tensor], names: LayerNames
) -> dict[fx.Node, np.ndarray[Any, Any]]:
    """Return the values in ``tensors`` that the network reads, not copied. Raises ModelImportError for other dtypes."""
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    arrays = {}
    for node, value in tensors.items():
        # Assertions have no users, and are not imported.
        readers = [user for user in node.users if user not in tensors and (user.users or user.op == "output")]
        if readers:
            require_importable(
                value.dtype, f"layer {names.layer_of(readers[0])!r} reads {targets.get(node.name, node.name)!r}, which"
            )
            arrays[node] = as_numpy(value)
    return arrays


def held_tensors(
    program: ExportedProgram, kinds: Container[InputKind] = frozenset(InputKind) - {InputKind.USER_INPUT}
) -> dict[fx.Node, torch.Tensor]:
    """Return the used placeholders of parameters, buffers and lifted constants, with their values."""
    held: dict[fx.Node, torch.Tensor] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind in kinds and node.users:
            value = program.state_dict.get(spec.target, program.constants.get(spec.target))
            if isinstance(value, torch.Tensor):  # not a generator of random numbers, whose readers are refused
                held[node] = value
    return held


def user_inputs(program: ExportedProgram) -> list[fx.Node]:
    """Return the placeholders of the user's input tensors, in order."""
    specs = program.graph_signature.input_specs
    placeholders = program.graph.find_nodes(op="placeholder")
    return [
        node
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind is InputKind.USER_INPUT and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def user_outputs(program: ExportedProgram) -> list[Any]:
    """Return the nodes (or constants) that the user's forward returns, flattened in torch's pytree order."""
    output = program.graph.find_nodes(op="output")[0]
    kinds = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    return [
        value
        for value, spec in zip(output.args[0], program.graph_signature.output_specs, strict=True)
        if spec.kind in kinds
    ]


def _nodes_before(nodes: list[Any]) -> set[fx.Node]:
    ancestors: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            waiting.extend(node.all_input_nodes)
    return ancestors


_NEED_ONLY_THE_SHAPE = (
    "full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
)  # fmt: skip
_UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_permuted", "empty_strided")
_LARGEST = 1 << 22
"""The most elements of a folded value; larger values are computed by the network instead of stored."""


def constant_values(program: ExportedProgram) -> dict[fx.Node, torch.Tensor]:
    """Return the calls whose value depends on neither inputs nor parameters (masks, positions), with the value."""
    values = held_tensors(program, {InputKind.BUFFER, InputKind.CONSTANT_TENSOR})
    values |= {node: value for node, value in held_tensors(program).items() if value.dtype not in IMPORTABLE}
    computed: dict[fx.Node, torch.Tensor] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            value = _value(node, values)
            if value is not None:
                values[node] = computed[node] = value
    return computed


def has_open_sizes(value: Any) -> bool:
    """Whether a tensor, or one in a sequence, has a size that is known only while the network runs."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return not all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _value(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    result = node.meta.get("val")
    operator: Any = node.target
    is_computable = isinstance(result, torch.Tensor) and isinstance(operator, torch._ops.OpOverload)
    if not is_computable or has_open_sizes(result):
        return None
    is_needed = any(values[source].dtype not in IMPORTABLE for source in node.all_input_nodes if source in values)
    if (result.numel() > _LARGEST and not is_needed) or torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    name = operator.__name__.partition(".")[0]
    if name in _UNINITIALISED:
        return torch.zeros(list(result.shape), dtype=result.dtype)
    sources = dict(values)
    if name in _NEED_ONLY_THE_SHAPE:
        for source in node.all_input_nodes:
            like = source.meta.get("val")
            if isinstance(like, torch.Tensor):
                sources.setdefault(source, torch.empty(list(like.shape), dtype=like.dtype))
    if not all(source in sources for source in node.all_input_nodes):
        return None
    keywords = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory")}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = operator(*fx.map_arg(node.args, sources.__getitem__), **fx.map_arg(keywords, sources.__getitem__))
    return value if isinstance(value, torch.Tensor) else None
