"""A call of an exported graph as the repairs of TVM's torch importer see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tvm_split.frontends.operators import Operators, is_float
from tvm_split.frontends.torch.tensors import dtype_name


class Call:
    """A call's arguments by their names in torch's schema, defaults filled in, nodes as Relax expressions."""

    def __init__(self, node: fx.Node, importer: Any) -> None:
        """``importer`` is TVM's: ``env`` maps nodes to expressions, ``block_builder`` binds them."""
        self.node = node
        self.importer = importer
        self.name = str(getattr(node.target, "__name__", node.target))
        schema: Any = getattr(node.target, "_schema", None)
        self.values: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments if schema else ()):
            is_placed = position < len(node.args) and not argument.kwarg_only
            given = node.args[position] if is_placed else node.kwargs.get(argument.name, argument.default_value)
            self.values[argument.name] = importer._retrieve_args(given)

    def __getitem__(self, argument: str) -> Any:
        return self.values[argument]

    def get(self, argument: str, otherwise: Any = None) -> Any:
        """An argument that not every overload has."""
        return self.values.get(argument, otherwise)

    @property
    def first(self) -> Any:
        """The argument that comes first, whatever its name."""
        return next(iter(self.values.values()))

    @property
    def operands(self) -> tuple[Any, Any]:
        """The first two arguments."""
        left, right, *_ = self.values.values()
        return left, right

    @property
    def common_dtype(self) -> str:
        """The dtype in which torch computes on both operands, tensors or Python numbers."""
        left, right = (each.meta["val"] if isinstance(each, fx.Node) else each for each in self.node.args[:2])
        return dtype_name(torch.result_type(left, right))

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The call's results in torch, without values."""
        value = self.node.meta["val"]
        return value if isinstance(value, list | tuple) else [value]

    @property
    def dtype(self) -> str:
        """The dtype of the (first) result in torch."""
        return dtype_name(self.results[0].dtype)

    @property
    def shape(self) -> list[int]:
        """The shape of the (first) result in torch."""
        return [int(size) for size in self.results[0].shape]

    def axes(self, rank: int) -> list[int]:
        """The axes that are reduced, not negative: ``dim``, or all of ``rank`` where there is none."""
        dim = self.get("dim")
        return [axis % max(rank, 1) for axis in ([dim] if isinstance(dim, int) else dim or range(rank))]


Repair = Callable[[Call, Operators], Any]
"""The result as an expression, or several in a tuple."""


def float_dtype(dtype: str) -> str:
    """``dtype``, or torch's default float if it is none: what integers become where a fraction may come out."""
    return dtype if is_float(dtype) else dtype_name(torch.get_default_dtype())


def each_axis(value: Any, count: int) -> list[int]:
    """Torch writes one number for all axes, or one for each."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers
