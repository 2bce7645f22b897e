"""Fuse attention into one kernel; it is matched among the operators before they are lowered.

    scores = matmul(query, key^T) [* scale] [+ mask ...]
    result = matmul(softmax(scores), value)      ──▶  result = attention(query, key, value[, mask])

This is for half precision on tensor cores; in float32 the products take as long as all else. Queries, keys and values
are read in place, through slices, reshapes, permutations and repeated heads. Scores that a constant condition replaces
by the lowest number are treated as scores with a mask.

Requires: a normalised function.
Ensures: ``result`` keeps its name and type; the values that were computed only for it are no longer used.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import mutator

from schedules.gpu.attention_kernel import Operands, Read, attention
from schedules.gpu.attention_tile import Attention, choose_attention_tile
from schedules.gpu.tile import Gpu
from schedules.relax_tools import ModuleMutator, broadcast_index, constant, operator_of, static_shape, widened_array_of
from schedules.template import IS_SCHEDULED, SCHEDULE_ATTRIBUTE
from schedules.views import Step, element_of, view_of

OPAQUE = {"op_pattern": 8, SCHEDULE_ATTRIBUTE: "attention", IS_SCHEDULED: True}
"""PrimFunc attributes of a kernel that is already scheduled and that nothing is fused into."""
FLOATS = ("float32", "float16", "bfloat16")
HIDDEN = -1e30
"""Values up to this, added to a score, hide it: -inf or the lowest float32. No score is that low by itself."""


@dataclass(frozen=True)
class _Scores:
    """Attention scores: ``matmul(query, transposed_key) * scale`` plus the ``masks``."""

    query: relax.Expr
    transposed_key: relax.Expr
    scale: float = 1.0
    masks: tuple[relax.Expr, ...] = ()


@mutator
class FuseAttention(ModuleMutator):
    """Rewrites attention as one kernel, if that is estimated to be faster than two products and a softmax."""

    def __init__(self, module: tvm.IRModule, gpu: Gpu) -> None:
        super().__init__(module)
        self.gpu = gpu
        self.uses = _uses(module)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != "relax.matmul":
            return call
        softmax = self._without_casts(call.args[0])
        if softmax is None or operator_of(softmax) != "relax.nn.softmax":
            return call
        if int(softmax.attrs.axis) not in (-1, len(static_shape(softmax) or ()) - 1):
            return call
        scores = self._scores(softmax.args[0])
        sizes = None if scores is None else _sizes(scores, call)
        if scores is None or sizes is None:
            return call
        operands = scores.query, scores.transposed_key, call.args[1]
        dtypes = {str(operand.ty.dtype) for operand in (*operands, call.args[0])}
        if len(dtypes) > 1 or not dtypes <= self.gpu.fragment_dtypes:
            return call
        in_place = [self._read_in_place(operand) for operand in operands]
        copies = sum(source is not operand for (source, _), operand in zip(in_place, operands, strict=True))
        tile = choose_attention_tile(sizes, self.gpu.processors, dtypes.pop(), copies)
        if tile is None:
            return call
        (query, read_query), (key, read_key), (value, read_value) = in_place
        masks = [self._added(scores.masks)] if scores.masks else []
        reads = Operands(
            read_query,
            lambda buffer, at: read_key(buffer, (*at[:-2], at[-1], at[-2])),
            read_value,
            partial(_broadcast, shape=static_shape(masks[0]) or ()) if masks else None,
        )
        compute = partial(
            attention, operands=reads, sizes=sizes, tile=tile, scale=scores.scale, dtype=str(call.ty.dtype)
        )
        return self.builder_.call_te(
            compute, query, key, value, *masks, primfunc_name_hint="attention", primfunc_attrs=OPAQUE
        )

    def _scores(self, expression: relax.Expr) -> _Scores | None:
        """Match the computation of scores; None if it has other operations, or if other operators need the scores."""
        value = self._without_casts(expression)
        if value is None or str(value.ty.dtype) not in FLOATS:
            return None
        name = operator_of(value)
        if name == "relax.matmul":
            return _Scores(value.args[0], value.args[1])
        if name in ("relax.multiply", "relax.divide"):
            factor = widened_array_of(value.args[1])
            inner = self._scores(value.args[0]) if factor is not None and factor.size == 1 else None
            if inner is None or inner.masks:
                return None
            number = float(factor.reshape(()))
            return replace(inner, scale=inner.scale * (number if name == "relax.multiply" else 1 / number))
        if name == "relax.add":
            for scores, mask in (value.args, reversed(value.args)):
                inner = self._scores(scores) if static_shape(scores) == static_shape(value) else None
                if inner is not None:
                    return replace(inner, masks=(*inner.masks, mask))
        if name == "relax.where":
            return self._replaced(value)
        return None

    def _replaced(self, value: relax.Expr) -> _Scores | None:
        """Match ``where`` with a constant condition that hides scores, as an added mask would; None if it does not."""
        condition = widened_array_of(value.args[0])
        for branch, scores in enumerate(value.args[1:]):
            lowest = widened_array_of(value.args[2 - branch])
            if condition is None or lowest is None or lowest.size != 1 or float(lowest.reshape(())) > HIDDEN:
                continue
            inner = self._scores(scores) if static_shape(scores) == static_shape(value) else None
            if inner is not None and not inner.masks:
                visible = condition.astype(bool) == (branch == 0)
                mask = np.where(visible, 0, lowest.reshape(())).astype(lowest.dtype)
                return replace(inner, masks=(*inner.masks, constant(mask)))
        return None

    def _without_casts(self, expression: relax.Expr) -> relax.Expr | None:
        """Return the value of a variable before any casts; None if the variable is not read exactly once."""
        while isinstance(expression, relax.Var):
            if self.uses[expression.name] != 1:
                return None
            value = self.lookup_binding(expression)
            source = _cast_of(value)
            if source is None:
                return value
            expression = source
        return None

    def _read_in_place(self, operand: relax.Expr) -> tuple[relax.Expr, Read]:
        """Return the tensor that an operand is a view of, and a function that reads the operand's elements from it."""
        steps: list[Step] = []
        while True:
            view = view_of(operand, self.lookup_binding)
            steps += view.steps
            source = _cast_of(self.lookup_binding(view.source)) if isinstance(view.source, relax.Var) else None
            if source is None or str(source.ty.dtype) != "float32":
                return view.source, partial(element_of, steps=tuple(steps))
            operand = source

    def _added(self, masks: Sequence[relax.Expr]) -> relax.Expr:
        if len({str(mask.ty.dtype) for mask in masks}) > 1:  # a mask made here from a condition is float32
            masks = [self.emit_beside(relax.op.astype(mask, "float32"), "mask") for mask in masks]
        total = masks[0]
        for mask in masks[1:]:
            total = self.emit_beside(relax.op.add(total, mask), "mask")
        return total


def _cast_of(value: relax.Expr | None) -> relax.Expr | None:
    """Return the operand of a cast between the floating-point dtypes used here; None for all other values."""
    if value is None or operator_of(value) != "relax.astype" or str(value.args[0].ty.dtype) not in FLOATS:
        return None
    return value.args[0]


def _broadcast(buffer: Any, indices: Sequence[Any], shape: Sequence[int]) -> Any:
    return buffer[tuple(broadcast_index(indices, shape))]


def _sizes(scores: _Scores, product: relax.Call) -> Attention | None:
    """Return the sizes of an attention; None unless the operands have the same batch and masks have static shapes."""
    operands = (scores.query, scores.transposed_key, product.args[1])
    query, key, value = (static_shape(operand) for operand in operands)
    if query is None or key is None or value is None or 0 in (*query, *key, *value):
        return None
    if not len(query) == len(key) == len(value) >= 2 or not query[:-2] == key[:-2] == value[:-2]:
        return None
    if any(static_shape(mask) is None for mask in scores.masks) or any(
        str(operand.ty.dtype) not in FLOATS for operand in operands
    ):
        return None
    # If there are several masks, a finite value may not hide a score: another mask may hide all others by the same
    # value.
    hidden = HIDDEN if len(scores.masks) == 1 else float("-inf")
    reaches = [_reach(widened_array_of(mask), query[-2], key[-1], hidden) for mask in scores.masks]
    reach = min((reach for reach in reaches if reach is not None), default=None)
    return Attention(query[:-2], query[-2], key[-1], query[-1], value[-1], reach)


def _reach(mask: Any, rows: int, keys: int, hidden: float) -> int | None:
    """Return the largest number of keys behind its own position that a row sees in any head, under a constant mask.

    None for other masks, if row 0 sees the last key, or if a row sees nothing: its softmax then depends on all keys.
    """
    if mask is None or mask.ndim < 2 or mask.shape[-2:] != (rows, keys):
        return None
    seen = (mask > hidden).reshape(-1, rows, keys)
    last = keys - 1 - seen[..., ::-1].argmax(-1)
    reach = max(int((last - np.arange(rows)).max()), 0)
    return reach if seen.any(-1).all() and reach < keys - 1 else None


def _uses(module: tvm.IRModule) -> Counter[str]:
    """Return the number of reads of each variable, by name."""
    reads: Counter[str] = Counter()

    def count(expression: relax.Expr) -> None:
        if isinstance(expression, relax.Var):
            reads[expression.name] += 1

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            for block in function.body.blocks:
                for binding in block.bindings:
                    relax.analysis.post_order_visit(binding.value, count)
            relax.analysis.post_order_visit(function.body.body, count)
    return reads
