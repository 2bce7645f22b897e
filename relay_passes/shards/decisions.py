"""Decide in one walk over a region how the machines hold each of its values.

    whole      every machine that needs it computes it         also a product with too few channels to shard
    part       each machine has a part of one axis             after a product whose weights' columns are sharded
    summand    each machine has a partial sum                  after a product whose rows are sharded

A product of a whole value is column-parallel, one of parts row-parallel, as in Megatron-LM (Shoeybi et al., 2019).
Between products, sharded axes are propagated from operator to operator (GSPMD, Xu et al., 2021). If an operator cannot
take a value in parts, the value is gathered before it. The decisions are `Step` values, which `channels` turns into
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

import numpy as np
from tvm import relax

from relay_passes.fold_constants import folded
from relay_passes.ir import ContractError, constant, is_tensor_constant, leaves_of, operator_name, shape_of, with_leaves
from relay_passes.shards.dealt_axes import Axis, Dealing, Passage, is_dealable
from relay_passes.shards.look_ahead import Dealt, LookAhead
from relay_passes.shards.region import Region, ShardError
from relay_passes.shards.summands import Others, Use, linear_passage

Form = Literal["whole", "part", "summand"]
_NO_PASSAGE = Passage((), ())


@dataclass(frozen=True)
class Step:
    """How one variable of the region is held and computed.

    ``uses`` has what is needed of each operand; an `Axis` means a part of a whole operand along that axis. ``passage``
    says how sharded axes pass the operation, and ``dealing`` has their bounds. ``others`` writes what all machines but
    the first compute from partial sums.
    """

    name: str
    value: relax.Expr
    form: Form
    uses: tuple[Use | Axis, ...]
    passage: Passage = _NO_PASSAGE
    dealing: Dealing = field(default_factory=lambda: Dealing(1))
    others: Others | None = None

    @property
    def axis(self) -> Axis:
        """The sharded axis of a tensor in parts; raises `ContractError` for any other value."""
        axis, *more = self.passage.results
        if axis is None or more:
            raise ContractError(f"{self.name!r} is no tensor in parts")
        return axis


class Decisions:
    """The steps of a region, and its literals: values computed from constants alone, by name."""

    def __init__(self, bindings: Sequence[relax.VarBinding], region: Region, *, by_heads: bool, fused: bool) -> None:
        self.steps: dict[str, Step] = {}
        self.literals: dict[str, relax.Expr] = {}
        self.is_split = False
        self.has_heads = False
        self.left_whole: ShardError | None = None
        """The error of the first product that stays whole because it has too few output channels or groups."""
        self._region = region
        self._dealt: dict[str, Dealt] = {}
        self._summands: set[str] = set()
        computed = [each for each in bindings if not self._is_literal(each)]
        self._ahead = LookAhead(
            computed, lambda leaf: self.constant_of(leaf) is not None, by_heads=by_heads, fused=fused
        )
        for place, binding in enumerate(computed):
            step = self._decided(place, binding.var.name, binding.value)
            self.steps[step.name] = step
            if step.form == "part":
                self._dealt[step.name] = Dealt(step.passage.results, step.dealing)
            elif step.form == "summand":
                self._summands.add(step.name)

    def constant_of(self, leaf: relax.Expr) -> relax.Expr | None:
        """Return the constant that an operand is or has as its value; None if it has none."""
        return leaf if is_tensor_constant(leaf) else self.literals.get(leaf.name)

    def _is_literal(self, binding: relax.VarBinding) -> bool:
        """Return whether a variable is computed from constants alone; store its value in `literals`."""
        value, leaves = binding.value, leaves_of(binding.value)
        known = [self.constant_of(leaf) for leaf in leaves]
        if not leaves or any(each is None for each in known):
            return False
        if is_tensor_constant(value):
            self.literals[binding.var.name] = value
            return True
        found = _value_of(value, known)
        if found is not None:
            self.literals[binding.var.name] = constant(found)
        return found is not None

    def _decided(self, place: int, name: str, value: relax.Expr) -> Step:
        if not isinstance(value, relax.Call | relax.TupleGetItem):
            raise ShardError(f"{name!r} is a {type(value).__name__}, not an operation; end the shard before it")
        names = self._ahead.leaf_names[place]
        is_summand = [each in self._summands for each in names]
        if any(is_summand):
            passing = linear_passage(value, is_summand)
            if passing is not None:
                return Step(name, value, "summand", passing.uses, others=passing.others)
            if isinstance(value, relax.TupleGetItem):
                raise ShardError(f"{name!r} takes a batch norm's statistics, of summands; end the shard before it")
            # After the all-reduce, a value is whole for all later readers.
            self._summands -= set(names)
        step = self._passed(place, [self._dealt.get(each) for each in names]) or self._shared_out(place)
        return step or Step(name, value, "whole", (Use.WHOLE,) * len(names))

    def _passed(self, place: int, dealt: Sequence[Dealt | None]) -> Step | None:
        """Return the step of an operation with sharded operands; None if none of them can pass.

        All sharded operands are tried together, then each alone with the others gathered.
        """
        value, first = self._ahead.values[place], dealt[0]
        if isinstance(value, relax.TupleGetItem):
            if first is None:
                return None
            return self._step(place, Passage((None,), (first.axes[value.index],)), first.dealing, [True])
        places = [each for each, operand in enumerate(dealt) if operand is not None]
        for kept in dict.fromkeys((tuple(places), *((each,) for each in places))):
            chosen = [operand if each in kept else None for each, operand in enumerate(dealt)]
            axes = [operand.axes[0] if operand is not None else None for operand in chosen]
            passing = self._ahead.passage(place, axes) if kept else None
            if passing is not None and (step := self._joined(place, passing, chosen)):
                return step
        return None

    def _joined(self, place: int, passage: Passage, operands: Sequence[Dealt | None]) -> Step | None:
        """Return the step if all sharded operands can have the same bounds, else None.

        Raises:
            ShardError: there are fewer heads, or groups of them, than the shares need.
        """
        dealings = [each.dealing for each in operands if each is not None]
        blocks = gcd(passage.blocks or 0, *(each.blocks for each in dealings))
        limit = self._said(place)
        if not is_dealable(blocks, self._region.shares):
            if passage.cuts:
                raise self._too_few(f"{limit} has {blocks} heads, or groups of them,", "split by 'channels'")
            return None
        for each in dealings:
            dealings[0].join(each, blocks)
        self.has_heads |= passage.cuts
        return self._step(place, passage, dealings[0], [each is not None for each in operands])

    def _step(self, place: int, passage: Passage, dealing: Dealing, is_own: Sequence[bool]) -> Step:
        uses = tuple(
            Use.OWN if own else Use.WHOLE if axis is None else axis
            for axis, own in zip(passage.operands, is_own, strict=True)
        )
        form: Form = "summand" if passage.sums else "part"
        return Step(self._ahead.names[place], self._ahead.values[place], form, uses, passage, dealing)

    def _shared_out(self, place: int) -> Step | None:
        """Return the step of a product with constant weights sharded by output channels; None if they cannot be."""
        value, leaves = self._ahead.values[place], self._ahead.leaves[place]
        operand, index, rank = _WEIGHTS.get(operator_name(value), (0, 0, -1))
        if rank < 0 or not self._ahead.known[place][operand] or len(shape_of(leaves[operand])) != rank:
            return None
        axes: list[Axis | None] = [None] * len(leaves)
        axes[operand] = Axis(index, 1, shape_of(leaves[operand])[index])
        if self._ahead.passage(place, axes) is None:
            return None
        axes[operand] = self._ahead.best_axis(place, axes, operand, self._dealt)
        passage = self._ahead.passage(place, axes)
        dealt = axes[operand]
        if passage is None or dealt is None:
            return None
        blocks = gcd(dealt.period, passage.blocks or 0)
        if not is_dealable(blocks, self._region.shares):
            what = "output channels" if blocks == dealt.period else "groups of channels"
            self.left_whole = self.left_whole or self._too_few(
                f"{self._said(place)} has {blocks} {what},", "leave it out of the shard"
            )
            return None
        self.is_split = True
        return self._step(place, passage, Dealing(blocks, dealt.period), [False] * len(leaves))

    def _said(self, place: int) -> str:
        return f"{self._ahead.names[place]!r} ({operator_name(self._ahead.values[place])})"

    def _too_few(self, what: str, instead: str) -> ShardError:
        shares = " / ".join(f"{share:g}" for share in self._region.shares)
        machines = len(self._region.machines)
        return ShardError(f"{what} too few for {machines} machines with shares {shares}: take fewer, or {instead}")


# Operator → (position of the weight operand, its axis of output channels, its required rank)
_WEIGHTS = {
    "relax.nn.conv1d": (1, 0, 3),
    "relax.nn.conv2d": (1, 0, 4),
    "relax.nn.conv3d": (1, 0, 5),
    "relax.matmul": (1, 1, 2),
    "relax.take": (0, 1, 2),
}


def _value_of(value: relax.Expr, known: Sequence[relax.Expr]) -> np.ndarray | None:
    """Return the value of an operation on constants: arithmetic, a view, or rows of a table; None for any other."""
    if not isinstance(value, relax.Call):
        return None
    if operator_name(value) != "relax.take":
        return folded(relax.BlockBuilder().normalize(with_leaves(value, known)))
    table, indices = (each.value.numpy() for each in known)
    axis = value.attrs.axis
    if axis is None or indices.min(initial=0) < 0 or indices.max(initial=0) >= table.shape[int(axis)]:
        return None
    rows: np.ndarray = np.take(table, indices, int(axis))
    return rows
