"""Compute reference values for a network of torch with torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tvm_split.frontends.torch.graph import held_tensors, user_inputs
from tvm_split.frontends.torch.tensors import to_numpy, to_torch


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


@contextmanager
def _exported_path() -> Iterator[None]:
    """Disable torch's fast path of attention: for a fully masked row it returns NaN, the exported path 0."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _results(program: ExportedProgram, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[fx.Node, Any]]:
    """Yield every call of the graph with its result; results are dropped after their last use."""
    values: dict[fx.Node, Any] = held_tensors(program) | dict(zip(user_inputs(program), inputs, strict=True))
    last_use = {source: node for node in program.graph.nodes for source in node.all_input_nodes}
    for node in program.graph.nodes:
        if node.op == "call_function":
            arguments = fx.map_arg(node.args, values.__getitem__)
            keywords = fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*arguments, **keywords)
            yield node, values[node]
            for source in node.all_input_nodes:
                if last_use.get(source) is node:
                    values.pop(source, None)
