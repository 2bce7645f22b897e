"""Fold nodes of an exported graph that depend on neither inputs nor parameters: masks, positions, scales."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tvm_split.frontends.torch.graph import held_tensors

_NEED_ONLY_THE_SHAPE = (
    "full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
)  # fmt: skip
_UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_permuted", "empty_strided")
_LARGEST = 1 << 22
"""The most elements of a folded value; larger values are computed by the network instead of stored."""


def constant_values(program: ExportedProgram) -> dict[fx.Node, torch.Tensor]:
    """Return the calls of the graph whose value is the same for every input, with their values."""
    known = held_tensors(program, {InputKind.BUFFER, InputKind.CONSTANT_TENSOR})
    found: dict[fx.Node, torch.Tensor] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            value = _value(node, known)
            if value is not None:
                known[node] = found[node] = value
    return found


def _value(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    result = node.meta.get("val")
    operator: Any = node.target
    if not isinstance(result, torch.Tensor) or not isinstance(operator, torch._ops.OpOverload):
        return None
    if result.numel() > _LARGEST or torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    name = operator.__name__.partition(".")[0]
    if name in _UNINITIALISED:
        return torch.zeros(list(result.shape), dtype=result.dtype)
    sources = dict(known)
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
