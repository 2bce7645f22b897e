"""Conversions that replace TVM's, which were wrong, missing or failing in TVM 0.27; comments at each say how.

``tests/tvm_split/frontends/test_torch_sweep.py`` compares each with torch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvm_split.frontends.convert import Call, Conversion
from tvm_split.frontends.operators import Operators, is_float, shape_of, wide
from tvm_split.frontends.torch.tensors import dtype_name


class TorchCall(Call):
    """A call; attributes are its arguments by their names in torch's schema, operands the same arguments in order."""

    @property
    def common_dtype(self) -> str:
        """The dtype to which torch promotes the first two arguments, tensors or Python numbers."""
        arguments = self.source.args[:2]
        left, right = (argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in arguments)
        return dtype_name(torch.result_type(left, right))

    @property
    def arithmetic_dtype(self) -> str:
        """The dtype in which torch computes: `common_dtype`, but float32 for half precision and a Python number."""
        has_number = not all(isinstance(argument, fx.Node) for argument in self.source.args[:2])
        return wide(self.common_dtype) if has_number else self.common_dtype

    def axes(self, rank: int) -> list[int]:
        """The reduced axes, non-negative: ``dim``, or all ``rank`` axes if it is absent or empty."""
        dim = self.get("dim")
        return [axis % rank for axis in ([dim] if isinstance(dim, int) else dim or range(rank))]


def also_of_scalars(conversion: Conversion) -> Conversion:
    """Return a conversion that takes a scalar ``self`` as a vector: torch accepts axes 0 and -1 of a scalar."""

    def convert(op: Operators, call: TorchCall) -> Any:
        if shape_of(call["self"]):
            return conversion(op, call)
        vector = op.reshape(call["self"], [1])
        results = conversion(op, replace(call, attributes={**call.attributes, "self": vector}))
        is_one = isinstance(results, relax.Expr)
        return op.reshape(results, []) if is_one else [op.reshape(result, []) for result in results]

    return convert


def float_dtype(dtype: str) -> str:
    """Return a float ``dtype`` unchanged, else torch's default float dtype, to which operators convert integers."""
    return dtype if is_float(dtype) else dtype_name(torch.get_default_dtype())


def each_axis(value: Any, count: int) -> list[int]:
    """Expand torch's one number for all axes to one number for each of ``count`` axes."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers
