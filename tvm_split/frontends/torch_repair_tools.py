"""What every repair of TVM's torch importer needs: arguments by name, torch's own dtypes, casts and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

Importer = Any
"""TVM's importer: ``env`` maps fx nodes to Relax expressions, ``block_builder`` emits."""

Repair = Callable[[fx.Node, Importer], Any]


def arguments(node: fx.Node, importer: Importer) -> dict[str, Any]:
    """Every argument of the operator by its name in torch's schema, defaults filled in, nodes as Relax expressions."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            value: Any = node.args[position]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            value = argument.default_value
        found[argument.name] = importer._retrieve_args(value)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def result_dtype(node: fx.Node) -> str:
    """The dtype of the node's result in torch."""
    value = node.meta["val"]
    return dtype_name((value[0] if isinstance(value, list | tuple) else value).dtype)


def result_shape(node: fx.Node) -> list[int]:
    """The shape of the node's result in torch."""
    return [int(size) for size in node.meta["val"].shape]


def common_dtype(*operands: Any) -> str:
    """The dtype in which torch computes on these operands (fx nodes or Python numbers)."""
    values = [operand.meta["val"] if isinstance(operand, fx.Node) else operand for operand in operands]
    dtype = torch.result_type(values[0], values[1]) if len(values) > 1 else values[0].dtype
    for value in values[2:]:
        dtype = torch.result_type(torch.empty(1, dtype=dtype, device="meta"), value)
    return dtype_name(dtype)


def float_dtype(dtype: str) -> str:
    """``dtype``, or torch's default float if it is none: what integers become where a fraction may come out."""
    return dtype if is_float(dtype) else dtype_name(torch.get_default_dtype())


def is_float(dtype: str) -> bool:
    return "float" in dtype


def dtype_of(value: relax.Expr) -> str:
    return str(value.ty.dtype)


def shape_of(value: relax.Expr) -> list[int]:
    return [int(size) for size in value.ty.shape]


def constant(value: float, dtype: str) -> relax.Expr:
    """A scalar constant."""
    return relax.const(np.asarray(value).astype(np.dtype(dtype)), dtype)


def emit(importer: Importer, expression: relax.Expr) -> relax.Expr:
    return importer.block_builder.emit(expression)


def cast(importer: Importer, value: Any, dtype: str) -> relax.Expr:
    """``value`` (an expression or a Python number) in ``dtype``."""
    if isinstance(value, bool | int | float):
        return constant(value, dtype)
    return value if dtype_of(value) == dtype else emit(importer, relax.op.astype(value, dtype))


def reduced_axes(dim: Any, rank: int) -> list[int]:
    """Torch's ``dim`` (None or nothing: every axis) as non-negative axes."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(rank))
    return [axis % max(rank, 1) for axis in ([dim] if isinstance(dim, int) else dim)]
