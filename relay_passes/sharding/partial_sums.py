"""Rules for linear operators on partial sums, before the all-reduce.

    Σ aₘ + b = (a₁ + b) + a₂ + …        k · Σ aₘ = Σ k · aₘ        view(Σ aₘ) = Σ view(aₘ)

Such an operation reads less data or saves an all-reduce. A bias or residual is added to the first machine's partial
sum. Two branches of partial sums need one all-reduce. A mean over pixels is sent instead of the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from tvm import relax

from relay_passes.ir import constant, is_tensor_constant, leaves_of, operator_name, shape_of, with_leaves


class Use(Enum):
    """What a machine needs of an operand: its own partial sum, or the whole value."""

    OWN = "own"
    WHOLE = "whole"
    WHOLE_ON_FIRST = "whole on the first machine"


WriteRest = Callable[[relax.Expr, Sequence[relax.Expr | None]], relax.Expr]


@dataclass(frozen=True)
class LinearPassage:
    """How partial sums pass an operator.

    ``uses`` has what a machine needs of each operand; ``write_rest`` writes what all machines but the first compute.
    """

    uses: tuple[Use, ...]
    write_rest: WriteRest | None = None


def linear_passage(value: relax.Expr, is_partial: Sequence[bool]) -> LinearPassage | None:
    """Return how partial sums pass an operation; None if they must be added up first."""
    operator = operator_name(value)
    leaves = leaves_of(value)
    if isinstance(value, relax.TupleGetItem):
        return LinearPassage((Use.OWN,)) if value.index == 0 else None
    if operator in _OF_ONE or (operator == "relax.take" and is_partial[0] and not is_partial[1]):
        return LinearPassage((Use.OWN, *[Use.WHOLE] * (len(leaves) - 1)))
    if operator == "relax.nn.batch_norm":
        return _batch_norm(value, is_partial)
    if operator not in _OF_TWO or any(
        partial and shape_of(leaf) != shape_of(value) for partial, leaf in zip(is_partial, leaves, strict=True)
    ):
        return None
    left, right = is_partial
    if operator in ("relax.multiply", "relax.divide"):
        if (left and right) or (operator == "relax.divide" and right):
            return None
        return LinearPassage(tuple(Use.OWN if partial else Use.WHOLE for partial in is_partial))
    if left and right:
        return LinearPassage((Use.OWN, Use.OWN))
    uses = tuple(Use.OWN if partial else Use.WHOLE_ON_FIRST for partial in is_partial)
    negated = operator == "relax.subtract" and right
    return LinearPassage(uses, _negated if negated else _unchanged)


_OF_TWO = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")
_OF_ONE = frozenset(
    f"relax.{name}"
    for name in (
        *("negative", "reshape", "flatten", "permute_dims", "expand_dims", "squeeze", "strided_slice", "mean", "sum"),
        *("nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d"),
    )
)


def _unchanged(_: relax.Expr, operands: Sequence[relax.Expr | None]) -> relax.Expr:
    return next(operand for operand in operands if operand is not None)


def _negated(_: relax.Expr, operands: Sequence[relax.Expr | None]) -> relax.Expr:
    return relax.op.negative(operands[1])


def _batch_norm(value: relax.Expr, is_partial: Sequence[bool]) -> LinearPassage | None:
    """Scale on every machine and shift on the first, if the statistics are constants."""
    data, *statistics = leaves_of(value)
    if not is_partial[0] or value.attrs.training or not all(map(is_tensor_constant, statistics)):
        return None
    zeros = constant(np.zeros(shape_of(statistics[0]), str(data.ty.dtype)))

    def scaled_only(value: relax.Expr, operands: Sequence[relax.Expr | None]) -> relax.Expr:
        partial, scale, _, _, variance = operands
        return with_leaves(value, [partial, scale, zeros, zeros, variance])

    uses = (Use.OWN, Use.WHOLE, Use.WHOLE_ON_FIRST, Use.WHOLE_ON_FIRST, Use.WHOLE)
    return LinearPassage(uses, scaled_only)
