"""Rules for linear operators on partial sums, before the all-reduce.

    Σ aₘ + b = (a₁ + b) + a₂ + …        k · Σ aₘ = Σ k · aₘ        view(Σ aₘ) = Σ view(aₘ)

Such an operation reads less data or saves an all-reduce. A bias or residual is added to the first machine's partial
sum. Two branches of partial sums need one all-reduce. A mean over pixels is sent instead of the pixels.
"""

from collections.abc import Sequence

import numpy as np
from tvm import relax

from relay_passes.ir import constant, is_tensor_constant, leaves_of, operator_name, shape_of, with_leaves
from relay_passes.sharding.region import Range
from relay_passes.sharding.rule import Emit, Rule, Write

_PARTIAL, _WHOLE, _ON_FIRST = "partial", "whole", "whole, on the first machine only"
"""How a machine reads an operand: its own partial sum, or a whole value."""


def linear_rule(value: relax.Expr, is_partial: Sequence[bool]) -> Rule | None:
    """Return the rule of an operation on partial sums; None if these must be added up before it.

    ``is_partial`` says for each variable and constant that ``value`` reads whether it is a partial sum.
    """
    operator, leaves = operator_name(value), leaves_of(value)
    if isinstance(value, relax.TupleGetItem):
        return _rule([_PARTIAL]) if value.index == 0 else None
    if operator in _OF_ONE or (operator == "relax.take" and is_partial[0] and not is_partial[1]):
        return _rule([_PARTIAL, *[_WHOLE] * (len(leaves) - 1)])
    if operator == "relax.nn.batch_norm":
        return _batch_norm(value, is_partial)
    if operator not in _OF_TWO or any(
        partial and shape_of(leaf) != shape_of(value) for partial, leaf in zip(is_partial, leaves, strict=True)
    ):
        return None
    left, right = is_partial
    if operator in ("relax.multiply", "relax.divide"):
        is_refused = (left and right) or (operator == "relax.divide" and right)
        return None if is_refused else _rule([_PARTIAL, _WHOLE] if left else [_WHOLE, _PARTIAL])
    if left and right:
        return _rule([_PARTIAL, _PARTIAL])

    def write(_: Range, operands: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        (partial,) = (operand for operand in operands if operand is not None)
        return relax.op.negative(partial) if operator == "relax.subtract" and right else partial

    return _rule([_PARTIAL, _ON_FIRST] if left else [_ON_FIRST, _PARTIAL], write)


def _rule(reads: Sequence[str], write: Write | None = None) -> Rule:
    """Return the rule of an operation with one of `_PARTIAL`, `_WHOLE` and `_ON_FIRST` for each operand."""
    nothing = (None,) * len(reads)
    is_partial, is_on_first = (tuple(read is way for read in reads) for way in (_PARTIAL, _ON_FIRST))
    return Rule(nothing, (None,), write=write, is_partial=is_partial, is_on_first=is_on_first)


_OF_TWO = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")
_OF_ONE = frozenset(
    f"relax.{name}"
    for name in (
        *("negative", "reshape", "flatten", "permute_dims", "expand_dims", "squeeze", "strided_slice", "mean", "sum"),
        *("nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d"),
    )
)


def _batch_norm(value: relax.Expr, is_partial: Sequence[bool]) -> Rule | None:
    """Return the rule of a batch norm of a partial sum: every machine scales it, only the first also shifts it.

    None in training, or if a statistic is not a constant.
    """
    data, *statistics = leaves_of(value)
    if not is_partial[0] or value.attrs.training or not all(map(is_tensor_constant, statistics)):
        return None
    zeros = constant(np.zeros(shape_of(statistics[0]), str(data.ty.dtype)))

    def write(_: Range, operands: Sequence[relax.Expr | None], emit: Emit) -> relax.Expr:
        return with_leaves(value, [zeros if operand is None else operand for operand in operands])

    return _rule([_PARTIAL, _WHOLE, _ON_FIRST, _ON_FIRST, _WHOLE], write)
