"""Decide in one walk over a region how the machines hold each of its values.

    whole      each machine that needs it computes it      also a product with too few channels to shard
    part       each machine has a range of one axis        from sharded inputs, or a product with sharded columns
    partial    each machine has a partial result           of a reduction, or a product with sharded rows

Sharding by rows, columns or batch begins at the values from before the region that have the axis, and every operation
that reads them propagates it. Sharding by channels or heads begins at constant weights. There, a product of a whole
value is column-parallel, one of parts row-parallel, as in Megatron-LM (Shoeybi et al., 2019). Between products, sharded
axes are propagated from operator to operator (GSPMD, Xu et al., 2021). A value is gathered before an operator that
cannot compute on parts of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from tvm import relax

from relay_passes.fold_constants import folded
from relay_passes.ir import constant, dependent_names, is_tensor_constant, leaves_of, shape_of, with_leaves
from relay_passes.sharding.partial_sums import linear_rule
from relay_passes.sharding.region import CommonBounds, Contents, ShardError, fit_blocks
from relay_passes.sharding.rule import Axis, Operation, Rule, operation_of
from relay_passes.sharding.rules import rule_of

Axes = tuple[Axis | None, ...]
MOST_BLOCKS = 8
"""Most blocks that are tried for an axis: fused projections have 2 (gates) to 4 (LSTM), channel shuffles up to 8."""
_DIVIDING = ("relax.reshape", "relax.split", "relax.strided_slice")


@dataclass(frozen=True)
class Step:
    """How the machines hold and compute one variable of the region.

    Without a ``rule``, each machine that needs the value computes all of it. ``bounds`` give the machines' ranges; if
    they are None, `ranges` chooses the ranges later.
    """

    operation: Operation
    rule: Rule | None = None
    bounds: CommonBounds | None = None

    @property
    def axis(self) -> Axis:
        """The axis whose ranges machines compute; only a step with a rule has one."""
        assert self.rule is not None  # noqa: S101  (the caller has looked)
        return self.rule.axis

    @property
    def is_partial(self) -> bool:
        return self.rule is not None and bool(self.rule.reduced or any(self.rule.is_partial))

    @property
    def axes(self) -> Axes | None:
        """The sharded axes of a value, one per field of a tuple; None if it is whole or a partial result."""
        return None if self.rule is None or self.is_partial else self.rule.results


def range_steps(contents: Contents, axis_name: str, index: int) -> dict[str, Step]:
    """Return, by variable, the steps of a region that is sharded by rows, columns or batch, axis ``index`` of images.

    Raises:
        ShardError: an operation cannot be sharded along the axis, or no value of the region has the axis.
    """
    outside = _outside_with(index, contents)
    axes: dict[str, Axes] = {name: (axis,) for name, axis in outside.items()}
    steps: dict[str, Step] = {}
    for binding in contents.bindings:
        whole = operation_of(binding, axis_name)
        operation = whole.with_axes([axes.get(name) for name in whole.names])
        is_sharded = any(operand.axis for operand in operation.operands)
        if is_sharded and isinstance(binding.value, relax.TupleGetItem) and operation.names[0] in outside:
            raise operation.refused("the tuple that it reads is from before the region")
        step = Step(operation, rule_of(operation) if is_sharded else None)
        steps[operation.name] = step
        if step.axes is not None:
            axes[operation.name] = step.axes
    if all(step.rule is None for step in steps.values()):
        names = contents.region.names
        raise ShardError(
            f"nothing from {names[0]!r} to {names[-1]!r} can be split along {axis_name}: no value before it has that"
            " axis with more than one index; choose another axis, or other layers"
        )
    return steps


def _outside_with(index: int, contents: Contents) -> dict[str, Axis]:
    """Return, by name, the sharded axis of each value from before the region that has axis ``index``.

    Only images and batches have it, if they are computed from inputs.
    """
    shapes = [shape_of(parameter) for parameter in contents.function.params]
    batch = next((shape[0] for shape in shapes if shape), 1)
    computed = dependent_names(contents.function)
    sharded = {}
    for name, value in contents.outside.items():
        shape = shape_of(value)
        has_axis = len(shape) == 4 and shape[index] > 1 if index else shape[:1] == (batch,) and batch > 1
        if has_axis and name in computed:
            sharded[name] = Axis(index, 1, shape[index])
    return sharded


class ChannelSteps:
    """The steps of a region whose weights are sharded, and its literals: values computed from constants, by name.

    With the axis ``"heads"``, an operation may divide one axis into several. With ``fused``, operations may make
    partial sums.

    Raises:
        ShardError: a machine would have no head; or no weight of the region can be sharded.
    """

    def __init__(self, contents: Contents, axis_name: str, *, fused: bool) -> None:
        self.steps: dict[str, Step] = {}
        self.literals: dict[str, relax.Expr] = {}
        self._shares, self._fused, self._by_heads = contents.region.shares, fused, axis_name == "heads"
        self._partial: set[str] = set()
        self._has_heads = self._is_sharded = False
        self._left_whole: ShardError | None = None
        computed = [binding for binding in contents.bindings if not self._is_literal(binding)]
        self._operations = operations = [operation_of(binding, axis_name) for binding in computed]
        self._last_use = {name: place for place, operation in enumerate(operations) for name in operation.names}
        for place, operation in enumerate(operations):
            step = self._step(place, operation)
            self.steps[operation.name] = step
            if step.is_partial:
                self._partial.add(operation.name)
        if not self._is_sharded and self._left_whole:
            raise self._left_whole
        if not self._is_sharded or (self._by_heads and not self._has_heads):
            missing = "attention's heads" if self._by_heads else "convolution or matrix product with constant weights"
            instead = "use axis 'channels'" if self._by_heads else "use axis 'rows', or an earlier first layer"
            first, last = contents.region.names[0], contents.region.names[-1]
            raise ShardError(f"{first!r} to {last!r} have no {missing} to shard: {instead}")

    def _known(self, leaf: relax.Expr) -> relax.Expr | None:
        return leaf if is_tensor_constant(leaf) else self.literals.get(leaf.name)

    def _is_literal(self, binding: relax.VarBinding) -> bool:
        """Return whether a variable is computed from constants alone; store its value in `literals`."""
        value, leaves = binding.value, leaves_of(binding.value)
        leaf_values = [self._known(leaf) for leaf in leaves]
        if not leaves or any(leaf is None for leaf in leaf_values):
            return False
        if is_tensor_constant(value):
            self.literals[binding.var.name] = value
        elif isinstance(value, relax.Call):
            result = folded(relax.BlockBuilder().normalize(with_leaves(value, leaf_values)))
            if result is not None:
                self.literals[binding.var.name] = constant(result)
        return binding.var.name in self.literals

    def _rule(self, operation: Operation) -> Rule | None:
        """Return the rule of an operation on its sharded operands; None if they must be gathered before it."""
        try:
            rule = rule_of(operation)
        except ShardError:
            return None
        if (rule.reduced and not (self._fused and rule.reduced == "sum")) or (rule.divides and not self._by_heads):
            return None
        for operand, axis in zip(operation.operands, rule.operands, strict=True):
            # Taking a part of several blocks from a whole value would cost as much as the operation.
            if operand.axis is None and axis and axis.outer > 1 and self._known(operand.expression) is None:
                return None
        return rule if rule.needs is None else None

    def _step(self, place: int, operation: Operation) -> Step:
        is_partial = [name in self._partial for name in operation.names]
        if any(is_partial):
            linear = linear_rule(operation.expression, is_partial)
            if linear is not None:
                return Step(operation, linear)
            if isinstance(operation.expression, relax.TupleGetItem):
                raise operation.refused("it reads the statistics of a batch norm whose input is a partial sum")
            # After the all-reduce, a value is whole for all later readers.
            self._partial -= set(operation.names)
        return self._on_parts(operation) or self._from_weights(place, operation) or Step(operation)

    def _on_parts(self, operation: Operation) -> Step | None:
        """Return the step of an operation that computes on parts of its sharded operands; None if no rule allows this.

        All sharded operands are tried together, then each alone with the others gathered.
        """
        before = [self.steps.get(name) for name in operation.names]
        axes = [self._axes_of(name) for name in operation.names]
        places = [place for place, operand_axes in enumerate(axes) if operand_axes is not None]
        for sharded_places in dict.fromkeys((tuple(places), *((place,) for place in places))):
            chosen = operation.with_axes(
                [operand_axes if place in sharded_places else None for place, operand_axes in enumerate(axes)]
            )
            rule = self._rule(chosen) if sharded_places else None
            all_bounds = [
                step.bounds for place, step in enumerate(before) if place in sharded_places and step and step.bounds
            ]
            if rule is not None and (step := self._with_common_bounds(chosen, rule, all_bounds)):
                return step
        return None

    def _with_common_bounds(self, operation: Operation, rule: Rule, operands: Sequence[CommonBounds]) -> Step | None:
        """Return the step if all sharded operands can have the same bounds, else None.

        Raises:
            ShardError: there are too few heads, or groups of heads, for the shares.
        """
        blocks = gcd(rule.blocks or 0, *(bounds.blocks for bounds in operands))
        if not fit_blocks(blocks, self._shares):
            if rule.divides:
                raise self._too_few(operation, f"{blocks} heads, or groups of them", "split by 'channels'")
            return None
        for bounds in operands:
            operands[0].join(bounds, blocks)
        self._has_heads |= rule.divides
        return Step(operation, rule, bounds=operands[0])

    def _from_weights(self, place: int, operation: Operation) -> Step | None:
        """Return the step of a product whose constant weights are sharded by output channels; None if impossible."""
        operand, index, rank = _WEIGHTS.get(operation.operator, (0, 0, -1))
        if rank < 0:
            return None
        weights = operation.operands[operand]
        if self._known(weights.expression) is None or len(weights.shape) != rank:
            return None

        def sharded(axis: Axis) -> Operation:
            return operation.with_axes([(axis,) if operand is weights else None for operand in operation.operands])

        axis = Axis(index, 1, weights.shape[index])
        if self._rule(sharded(axis)) is None:
            return None
        axis = self._best_axis(place, operand, axis)
        rule = self._rule(sharded(axis))
        if rule is None:
            return None
        blocks = gcd(axis.length, rule.blocks or 0)
        if not fit_blocks(blocks, self._shares):
            what = "output channels" if blocks == axis.length else "groups of channels"
            too_few = self._too_few(operation, f"{blocks} {what}", "leave it out of the sharded layers")
            self._left_whole = self._left_whole or too_few
            return None
        self._is_sharded = True
        # The weights are held whole: each machine has a part of the constant.
        return Step(operation, rule, bounds=CommonBounds(blocks, axis.length))

    def _too_few(self, operation: Operation, what: str, instead: str) -> ShardError:
        shares = " / ".join(f"{share:g}" for share in self._shares)
        return ShardError(
            f"{operation.name!r} ({operation.operator}) has {what}, too few for {len(self._shares)} machines with"
            f" shares {shares}: take fewer, or {instead}"
        )

    def _best_axis(self, place: int, operand: int, single: Axis) -> Axis:
        """Return ``single``, an axis of one block, divided into the blocks that stay sharded through most operators.

        The columns of a fused query-key-value projection can be sharded as one block, or as three blocks with the same
        bounds. Only the operators behind it show that each machine needs the same heads of all three. So if a later
        reshape, slice or split ends the sharding of a product's columns, more blocks are tried, the fewest first.
        """

        def reached(axis: Axis) -> dict[str, Axes]:
            operation = self._operations[place]
            axes = [(axis,) if index == operand else None for index in range(len(operation.operands))]
            rule = self._rule(operation.with_axes(axes))
            return {} if rule is None else self._reached(place, rule.results)

        of_single = reached(single)
        best, most = single, len(of_single)
        for outer in range(2, MOST_BLOCKS + 1) if self._is_divided(place, of_single) else ():
            if single.length % outer == 0:
                axis = Axis(single.index, outer, single.length // outer)
                if (count := len(reached(axis))) > most:
                    best, most = axis, count
        return best

    def _reached(self, place: int, results: Axes) -> dict[str, Axes]:
        """Return the axes of the values that stay sharded if the result at ``place`` has the axes ``results``."""
        name = self._operations[place].name
        axes_of = {name: results}
        last = self._last_use.get(name, place)
        while (place := place + 1) <= last:
            operation = self._operations[place]
            operand_axes = [axes_of.get(name) for name in operation.names]
            if not any(operand_axes):
                continue
            # The other operands are sharded as they already are, or gathered if that does not fit.
            beside = [axes or self._axes_of(name) for axes, name in zip(operand_axes, operation.names, strict=True)]
            rules = (self._rule(operation.with_axes(axes)) for axes in (beside, operand_axes))
            rule = next((rule for rule in rules if rule is not None), None)
            if rule is not None and not rule.reduced:
                axes_of[operation.name] = rule.results
                last = max(last, self._last_use.get(operation.name, place))
        return axes_of

    def _axes_of(self, name: str) -> Axes | None:
        """Return the sharded axes of a value; None if it is whole, a partial result, or from before the region."""
        return self.steps[name].axes if name in self.steps else None

    def _is_divided(self, place: int, reached: Mapping[str, Axes]) -> bool:
        """Return whether a reshape, split or slice behind ``place`` reads a value in ``reached`` and is not in it."""
        return any(
            operation.operator in _DIVIDING and operation.name not in reached and reached.keys() & {*operation.names}
            for operation in self._operations[place + 1 :]
        )


_WEIGHTS: Mapping[str, tuple[int, int, int]] = {
    "relax.nn.conv1d": (1, 0, 3),
    "relax.nn.conv2d": (1, 0, 4),
    "relax.nn.conv3d": (1, 0, 5),
    "relax.matmul": (1, 1, 2),
    "relax.take": (0, 1, 2),
}
"""Operator → (position of the weight operand, its axis of output channels, its required rank)."""
