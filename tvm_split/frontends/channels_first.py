"""Rewrite Relax functions from channels last to channels first.

JAX, TensorFlow and TFLite have channels last, but kernels are fastest with channels first. Convolutions, pooling and
resizing are rewritten to channels first, and the operators after them keep that order of axes. A transposition only
updates the recorded order of axes. Values are transposed only where an operator supports no other order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from relay_passes.ir import bindings_of, call_like
from relay_passes.sharding.compute_rules import ELEMENTWISE, REDUCTIONS
from tvm_split.frontends.building import Built, ModelBuilder
from tvm_split.frontends.operators import Operators, numbers_of, shape_of

_FIRST = "NCHW"


@dataclass(frozen=True)
class Value:
    """A tensor of the original function: axis i of ``expr`` is the tensor's axis ``order[i]``."""

    expr: relax.Expr
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's sizes in its original order of axes."""
        sizes = dict(zip(self.order, shape_of(self.expr), strict=True))
        return tuple(sizes[axis] for axis in range(self.rank))

    @property
    def rank(self) -> int:
        return len(self.order)

    @property
    def is_constant(self) -> bool:
        return numbers_of(self.expr) is not None


def in_place(expr: relax.Expr) -> Value:
    """A value whose expression has the original order of axes."""
    return Value(expr, tuple(range(len(shape_of(expr)))))


class Arranger(Operators):
    """Relax's operators, plus cached transpositions of values into the order that an operator needs."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._arranged: dict[tuple[str, tuple[int, ...], tuple[int, ...]], relax.Expr] = {}

    def in_order(self, value: Value, order: Sequence[int] | None = None) -> relax.Expr:
        """Return ``value`` with its axes in ``order``; by default in the original order."""
        order = tuple(range(value.rank) if order is None else order)
        places = [value.order.index(axis) for axis in order]
        if order == value.order or value.is_constant:
            return self.transposed(value.expr, places)
        key = (value.expr.name, value.order, order)
        if key not in self._arranged:
            sizes = shape_of(value.expr)
            moved = [place for place in places if sizes[place] != 1]
            if moved == sorted(moved):  # only axes of size 1 change places
                self._arranged[key] = self.reshape(value.expr, [sizes[place] for place in places])
            else:
                self._arranged[key] = self.permute_dims(value.expr, places)
        return self._arranged[key]


Result = Value | list[Value]
Rule = Callable[[Arranger, relax.Call, Sequence[Value]], Result]


def channels_first(built: Built) -> Built:
    """Rewrite a network to channels first."""
    function = built.module["main"]
    builder = ModelBuilder()
    op = Arranger(builder)
    values: dict[relax.Var, Result] = {}
    with builder.main(built.inputs) as parameters:
        values.update((old, in_place(new)) for old, new in zip(function.params, parameters, strict=True))
        for binding in bindings_of(function):
            builder.layer = built.layers[binding.var.name]
            values[binding.var] = _converted(op, binding.value, values)
        builder.outputs = [_returned(op, value) for value in _listed(_value(op, function.body.body, values))]
    by_name = {variable.name: value for variable, value in values.items() if isinstance(value, Value)}
    held = {source: by_name[name] for source, name in built.held.items()}
    arranged = builder.built({source: value.expr for source, value in held.items()})
    orders = {name: held[source].order for source, name in arranged.held.items()}
    empty = dict.fromkeys(set(built.layers.values()).difference(arranged.layers.values()), "")
    return replace(arranged, orders=orders, empty_layers={**built.empty_layers, **empty})


def _returned(op: Arranger, value: Value) -> relax.Expr:
    """An output in its original order of axes; a transposition for it belongs to the layer that makes it."""
    op.builder.layer = op.builder.layers.get(getattr(value.expr, "name", ""), op.builder.layer)
    return op.in_order(value)


def _listed(value: Result) -> list[Value]:
    return value if isinstance(value, list) else [value]


def _value(op: Arranger, expr: relax.Expr, values: Mapping[relax.Var, Result]) -> Result:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, relax.Tuple):
        return [result for field in expr.fields for result in _listed(_value(op, field, values))]
    return in_place(expr)


def _converted(op: Arranger, expr: relax.Expr, values: Mapping[relax.Var, Result]) -> Result:
    if isinstance(expr, relax.TupleGetItem):
        return _listed(_value(op, expr.tuple_value, values))[int(expr.index)]
    if not isinstance(expr, relax.Call):
        return _value(op, expr, values)
    tensors = [
        value for argument in expr.args if _is_tensor(argument) for value in _listed(_value(op, argument, values))
    ]
    rule: Rule | None = _RULES.get(expr.op.name)
    return rule(op, expr, tensors) if rule is not None else _as_it_is(op, expr, values)


def _is_tensor(argument: relax.Expr) -> bool:
    is_tuple = isinstance(argument, relax.Tuple) and all(_is_tensor(field) for field in argument.fields)
    return is_tuple or isinstance(argument, relax.Var) or numbers_of(argument) is not None


def _as_it_is(op: Arranger, call: relax.Call, values: Mapping[relax.Var, Result]) -> Result:
    """Emit an operator without a rule here, with operands in their original order of axes."""

    def substituted(argument: relax.Expr) -> relax.Expr:
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([substituted(field) for field in argument.fields])
        if not isinstance(argument, relax.Var):
            return argument
        tensors = [op.in_order(value) for value in _listed(values[argument])]
        return tensors[0] if isinstance(argument.ty, relax.TensorType) else relax.Tuple(tensors)

    result = _changed(op, call, [substituted(argument) for argument in call.args])
    if isinstance(result.ty, relax.TupleType):
        return [in_place(op.item(result, index)) for index in range(len(result.ty.fields))]
    return in_place(result)


def _changed(op: Arranger, call: relax.Call, arguments: Sequence[relax.Expr], **changes: Any) -> relax.Expr:
    """Emit ``call`` with other arguments, and with ``changes`` of its attributes."""
    return op.builder.emit(call_like(call, arguments, **changes))


def _elementwise(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    ranked = [_with_rank(op, value, len(shape_of(call))) for value in operands]
    order = _leading_order([value for value in ranked if value.rank] or ranked)
    tensors = iter(op.in_order(value, order) if value.rank else value.expr for value in ranked)
    return Value(
        _changed(op, call, [next(tensors) if _is_tensor(argument) else argument for argument in call.args]), order
    )


def _with_rank(op: Arranger, value: Value, rank: int) -> Value:
    """``value`` with leading axes of size 1 up to ``rank`` axes; scalars are unchanged."""
    added = rank - value.rank
    if not added or not value.rank:
        return value
    return in_place(op.shaped(op.in_order(value), [1] * added + list(value.shape)))


def _transposed(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    axes = call.attrs.axes
    moved = [int(axis) % data.rank for axis in axes] if axes is not None else list(reversed(range(data.rank)))
    return Value(data.expr, tuple(moved.index(axis) for axis in data.order))


def _reduced(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    reduced, keeps = call.attrs.axis, bool(call.attrs.keepdims)
    if reduced is None:
        return in_place(_changed(op, call, [op.in_order(data)]))
    axes = {int(axis) % data.rank for axis in (reduced if hasattr(reduced, "__len__") else [reduced])}
    places = sorted(data.order.index(axis) for axis in axes)
    result = _changed(op, call, [data.expr], axis=places if hasattr(reduced, "__len__") else places[0])
    remaining = [axis for axis in data.order if keeps or axis not in axes]
    return Value(result, tuple(sorted(remaining).index(axis) for axis in remaining))


def _along_one_axis(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    """Convert a softmax, or ``quantize`` and ``dequantize``, whose scales lie along one axis."""
    data, *scales = operands
    axis = int(call.attrs.axis) % max(data.rank, 1)
    place = data.order.index(axis) if data.rank else 0
    return Value(_changed(op, call, [data.expr, *(scale.expr for scale in scales)], axis=place), data.order)


def _padded(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    pairs = np.asarray([int(width) for width in call.attrs.pad_width]).reshape(-1, 2)
    widths = [int(width) for width in pairs[list(data.order)].reshape(-1)]
    return Value(_changed(op, call, [data.expr, *call.args[1:]], pad_width=widths), data.order)


def _joined(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    order = _leading_order(operands)
    parts = relax.Tuple([op.in_order(value, order) for value in operands])
    return Value(_changed(op, call, [parts], axis=order.index(int(call.attrs.axis) % len(order))), order)


def _split(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> list[Value]:
    (data,) = operands
    pieces = _changed(op, call, [data.expr], axis=data.order.index(int(call.attrs.axis) % data.rank))
    return [Value(op.item(pieces, index), data.order) for index in range(len(call.ty.fields))]


def _cut(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    axes = [data.order.index(int(axis.value) % data.rank) for axis in call.args[1].fields]
    begin, end, *step = ([int(number.value) for number in argument.fields] for argument in call.args[2:])
    result = op.strided_slice(data.expr, axes, begin, end, *step)
    return Value(result, data.order)


def _reshaped(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    """Convert a reshape. If it only adds or removes axes of size 1, the order of axes is kept; else it is restored."""
    (data,) = operands
    shape = shape_of(call)
    before = [axis for axis in range(data.rank) if data.shape[axis] != 1]
    after = [axis for axis in range(len(shape)) if shape[axis] != 1]
    if [data.shape[axis] for axis in before] != [shape[axis] for axis in after]:
        return in_place(op.shaped(op.in_order(data), shape))
    becomes = dict(zip(before, after, strict=True))
    lying = [becomes[axis] for axis in data.order if axis in becomes]
    order = list(range(len(shape)))
    if lying != after:
        order = [axis for axis in order if axis not in lying] + lying
    return Value(op.shaped(data.expr, [shape[axis] for axis in order]), tuple(order))


def _broadcast(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    data, shape = _with_rank(op, operands[0], len(shape_of(call))), shape_of(call)
    if not data.rank:
        return in_place(op.repeated(data.expr, shape))
    return Value(op.repeated(data.expr, [shape[axis] for axis in data.order]), data.order)


def _leading_order(values: Sequence[Value]) -> tuple[int, ...]:
    """The order of axes of the largest non-constant value, so that this value is not transposed."""
    candidates = [value for value in values if not value.is_constant] or list(values)
    return max(candidates, key=lambda value: np.prod(shape_of(value.expr)) if value.rank else 0).order


def _order(layout: str) -> tuple[int, ...]:
    """For each axis of NCHW, its position in ``layout``."""
    return tuple(layout.index(axis) for axis in _FIRST)


def _convolved(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    data, weight = operands
    order = _order(call.attrs.data_layout)
    kernel = "IOHW" if call.op.name.endswith("transpose") else "OIHW"
    weights = op.in_order(weight, [call.attrs.kernel_layout.index(axis) for axis in kernel])
    layouts = {"data_layout": _FIRST, "out_layout": _FIRST, "kernel_layout": kernel}
    return Value(_changed(op, call, [op.in_order(data, order), weights], **layouts), order)


def _pooled_or_resized(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    order = _order(call.attrs.layout)
    layouts = {name: _FIRST for name in ("layout", "out_layout") if hasattr(call.attrs, name)}
    return Value(_changed(op, call, [op.in_order(operands[0], order), *call.args[1:]], **layouts), order)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(
        ("relax.nn.softmax", "relax.nn.log_softmax", "relax.quantize", "relax.dequantize"), _along_one_axis
    ),
    **dict.fromkeys(("relax.nn.conv2d", "relax.nn.conv2d_transpose"), _convolved),
    **dict.fromkeys(("relax.nn.max_pool2d", "relax.nn.avg_pool2d", "relax.image.resize2d"), _pooled_or_resized),
    "relax.permute_dims": _transposed,
    "relax.reshape": _reshaped,
    "relax.broadcast_to": _broadcast,
    "relax.nn.pad": _padded,
    "relax.concat": _joined,
    "relax.split": _split,
    "relax.strided_slice": _cut,
}
