"""The arguments of a conversion: a call of an exported graph, with its operands in Relax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tvm_split.frontends.operators import Operators, is_float
from tvm_split.frontends.torch.tensors import dtype_name


class Call:
    """A call's arguments by their names in torch's schema, with defaults, and nodes as Relax expressions."""

    def __init__(self, node: fx.Node, importer: Any) -> None:
        """``importer`` is TVM's: its ``env`` maps nodes to expressions, and its ``block_builder`` binds them."""
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
        """An argument that not every overload has; ``otherwise`` if it is absent."""
        return self.values.get(argument, otherwise)

    @property
    def first(self) -> Any:
        """The first argument, independent of its name."""
        return next(iter(self.values.values()))

    @property
    def operands(self) -> tuple[Any, Any]:
        """The first two arguments."""
        left, right, *_ = self.values.values()
        return left, right

    @property
    def common_dtype(self) -> str:
        """The dtype to which torch promotes the first two arguments, tensors or Python numbers."""
        left, right = (each.meta["val"] if isinstance(each, fx.Node) else each for each in self.node.args[:2])
        return dtype_name(torch.result_type(left, right))

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The call's results in torch, as tensors without values."""
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
        """The reduced axes, non-negative: ``dim``, or all ``rank`` axes if it is absent or empty."""
        dim = self.get("dim")
        return [axis % max(rank, 1) for axis in ([dim] if isinstance(dim, int) else dim or range(rank))]


Repair = Callable[[Call, Operators], Any]
"""A conversion: returns the result as an expression, or several results in a tuple."""


def float_dtype(dtype: str) -> str:
    """Return a float ``dtype`` unchanged, else torch's default float dtype, to which operators convert integers."""
    return dtype if is_float(dtype) else dtype_name(torch.get_default_dtype())


def each_axis(value: Any, count: int) -> list[int]:
    """Expand torch's one number for all axes to one number for each of ``count`` axes."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers
