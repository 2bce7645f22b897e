"""Names of layers: where in the user's module tree a node of an exported graph came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx
from torch.export import ExportedProgram


class LayerNames:
    """The layer of every node of one exported program.

    A node inside a module without children belongs to that module (``layer1.0.conv1``); torch counts further calls of
    the same module (``layer1.0.relu@1``). A node that a container computes itself is the container's path and the
    node's name before decomposition (``layer1.0.add_``), at the root just that name.
    """

    def __init__(self, program: ExportedProgram) -> None:
        paths = {path for node in program.graph.nodes for _, path in _stack(node)}
        paths.update(target.rpartition(".")[0] for target in program.state_dict)
        self._containers = {ancestor for path in paths for ancestor in _ancestors(path)}

    def layer_of(self, node: fx.Node) -> str:
        stack = _stack(node)
        if not stack:
            return _name_in_source(node)
        key, path = stack[-1]
        call = key.rpartition("@")[2] if "@" in key else ""
        module = f"{path}@{call}" if call.isdigit() else path
        if path and path not in self._containers:
            return module
        return f"{module}.{_name_in_source(node)}" if path else _name_in_source(node)


def _stack(node: fx.Node) -> list[tuple[str, str]]:
    """Pairs of torch's key (with the number of the call) and path, outermost module first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return [(key, str(entry[0])) for key, entry in stack.items() if isinstance(entry, tuple)]


def _ancestors(path: str) -> Iterable[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _name_in_source(node: fx.Node) -> str:
    """The node's name in the graph that torch.export made, before operators were decomposed."""
    sources = node.meta.get("from_node")
    return str(sources[0].name) if sources else str(node.name)
