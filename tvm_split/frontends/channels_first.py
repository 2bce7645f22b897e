"""Relax with channels last becomes Relax with channels first, whose axes lie as they were computed.

Kernels are scheduled for channels first. Convolutions, pools and resizings are written so, what follows keeps their
order of axes, a transposition only changes what the order is called, and values are brought into order where an
operator knows no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relay_passes.shards.along.elementwise import ELEMENTWISE, REDUCTIONS
from tvm_split.frontends.axis_orders import Arrangement, Arranger, Value, in_place, leading_order
from tvm_split.frontends.importing import Imported, RecordingBuilder
from tvm_split.frontends.normal_form import layers_of_all
from tvm_split.frontends.operators import numbers_of, shape_of

Result = Value | list[Value]
Rule = Callable[[Arranger, relax.Call, Sequence[Value]], Result]

_FIRST = "NCHW"


@dataclass(frozen=True)
class LaidOut:
    """What is held is what was held before, arranged as ``arrangements`` say."""

    imported: Imported
    arrangements: Mapping[Any, Arrangement]


def channels_first(imported: Imported) -> LaidOut:
    """Rewrite ``imported``, one block of straight-line code over static shapes."""
    function = imported.function
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    layer_of = layers_of_all(bindings, imported.layers)
    builder = RecordingBuilder()
    op = Arranger(builder)
    values: dict[relax.Var, Result] = {parameter: in_place(parameter) for parameter in function.params}
    with builder.function("main", function.params):
        with builder.dataflow():
            for binding in bindings:
                builder.layer = layer_of[binding.var]
                values[binding.var] = _converted(op, binding.value, values)
            fields = [_returned(op, value) for value in _listed(_value(op, function.body.body, values))]
            builder.layer = "output"
            result = builder.emit_output(relax.Tuple(fields))
        builder.emit_func_output(result)
    by_name = {variable.name: value for variable, value in values.items() if isinstance(value, Value)}
    held = {source: by_name[name] for name, source in imported.held.items() if name in by_name}
    arrangements = {source: value.arrangement for source, value in held.items()}
    return LaidOut(builder.imported({source: value.expr for source, value in held.items()}), arrangements)


def _returned(op: Arranger, value: Value) -> relax.Expr:
    """An output in order, which belongs to the layer that makes it."""
    op.builder.layer = op.builder.layers.get(getattr(value.expr, "name", ""), op.builder.layer)
    return op.full(value)


def _listed(value: Result) -> list[Value]:
    return value if isinstance(value, list) else [value]


def _value(op: Arranger, expr: relax.Expr, values: Mapping[relax.Var, Result]) -> Result:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, relax.Tuple):
        return [one for field in expr.fields for one in _listed(_value(op, field, values))]
    return in_place(expr)


def _converted(op: Arranger, expr: relax.Expr, values: Mapping[relax.Var, Result]) -> Result:
    if isinstance(expr, relax.TupleGetItem):
        return _listed(_value(op, expr.tuple_value, values))[int(expr.index)]
    if not isinstance(expr, relax.Call):
        return _value(op, expr, values)
    tensors = [value for each in expr.args if _is_tensor(each) for value in _listed(_value(op, each, values))]
    known = _computed(expr, tensors)
    if known is not None:
        return in_place(known)
    rule: Rule | None = _RULES.get(expr.op.name)
    return rule(op, expr, tensors) if rule is not None else _as_it_is(op, expr, values)


def _is_tensor(argument: relax.Expr) -> bool:
    is_tuple = isinstance(argument, relax.Tuple) and all(_is_tensor(field) for field in argument.fields)
    return is_tuple or isinstance(argument, relax.Var) or numbers_of(argument) is not None


def _as_it_is(op: Arranger, call: relax.Call, values: Mapping[relax.Var, Result]) -> Result:
    """Operators that are not known here get their operands in order."""

    def substituted(argument: relax.Expr) -> relax.Expr:
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([substituted(field) for field in argument.fields])
        if not isinstance(argument, relax.Var):
            return argument
        found = [op.full(value) for value in _listed(values[argument])]
        return found[0] if isinstance(argument.ty, relax.TensorType) else relax.Tuple(found)

    return _emitted(op, call, [substituted(argument) for argument in call.args])


def _emitted(op: Arranger, call: relax.Call, arguments: Sequence[relax.Expr]) -> Result:
    result = op.builder.emit(relax.Call(call.op, list(arguments), call.attrs, call.ty_args))
    if isinstance(result.ty, relax.TupleType):
        fields = range(len(result.ty.fields))
        return [in_place(op.builder.emit(relax.TupleGetItem(result, index))) for index in fields]
    return in_place(result)


def _computed(call: relax.Call, operands: Sequence[Value]) -> relax.Expr | None:
    """What weights are brought into before they are used."""
    arrays = [numbers_of(value.expr) for value in operands]
    function = _OF_WEIGHTS.get(call.op.name)
    if function is None or not arrays or any(array is None for array in arrays):
        return None
    kind = call.ty
    result = np.asarray(function(call, *arrays)).reshape(shape_of(call))
    return relax.const(np.ascontiguousarray(result).astype(np.dtype(str(kind.dtype))), str(kind.dtype))


def _dequantized(call: relax.Call, data: Any, scale: Any, zero_point: Any) -> Any:
    shape = [1] * data.ndim
    if scale.ndim and data.ndim:
        shape[int(call.attrs.axis)] = scale.size
    zero_point = zero_point.astype("int64").reshape(shape if zero_point.ndim else ())
    # In the order of the rounding that TFLite has: the difference is exact, the product is rounded once.
    return (data.astype("int64") - zero_point).astype("float32") * (scale.reshape(shape) if scale.ndim else scale)


_OF_WEIGHTS: dict[str, Callable[..., Any]] = {
    "relax.permute_dims": lambda call, data: data.transpose([int(axis) for axis in call.attrs.axes]),
    "relax.reshape": lambda call, data: data,
    "relax.astype": lambda call, data: data,
    "relax.multiply": lambda call, left, right: left * right,
    "relax.dequantize": _dequantized,
}


def _elementwise(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    shape = tuple(shape_of(call))
    ranked = [_with_rank(op, value, len(shape)) for value in operands]
    order = leading_order([value for value in ranked if value.rank] or ranked)
    tensors = iter(op.in_order(value, order) if value.rank else value.expr for value in ranked)
    arguments = [next(tensors) if _is_tensor(argument) else argument for argument in call.args]
    result = op.builder.emit(relax.Call(call.op, arguments, call.attrs, call.ty_args))
    return Value(result, order, shape)


def _with_rank(op: Arranger, value: Value, rank: int) -> Value:
    """``value`` with as many axes as it is computed with; scalars stay what they are."""
    added = rank - value.rank
    if not added or not value.rank:
        return value
    expr = op.shaped(op.full(value), [1] * added + list(value.shape))
    return in_place(expr)


def _transposed(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    axes = call.attrs.axes
    moved = [int(axis) % data.rank for axis in axes] if axes is not None else list(reversed(range(data.rank)))
    return Value(data.expr, tuple(moved.index(axis) for axis in data.order), tuple(shape_of(call)))


def _reduced(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    given = call.attrs.axis
    if given is None:
        return in_place(op.builder.emit(relax.Call(call.op, [op.full(data)], call.attrs, call.ty_args)))
    axes = {int(axis) % data.rank for axis in (given if hasattr(given, "__len__") else [given])}
    places = sorted(data.order.index(axis) for axis in axes)
    keeps = bool(call.attrs.keepdims)
    name = call.op.name.removeprefix("relax.")
    place: Any = places if hasattr(given, "__len__") else places[0]
    result = getattr(op, name)(data.expr, axis=place, keepdims=keeps)
    left = [axis for axis in data.order if keeps or axis not in axes]
    return Value(result, tuple(sorted(left).index(axis) for axis in left), tuple(shape_of(call)))


def _normalised(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    place = data.order.index(int(call.attrs.axis) % data.rank)
    result = getattr(op.nn, call.op.name.removeprefix("relax.nn."))(data.expr, axis=place)
    return Value(result, data.order, data.shape)


def _scaled(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    """``quantize`` and ``dequantize``, whose scales lie along one axis."""
    data, scale, zero_point = operands
    axis = int(call.attrs.axis) % max(data.rank, 1)
    place = data.order.index(axis) if data.rank else 0
    convert = getattr(op, call.op.name.removeprefix("relax."))
    result = convert(data.expr, scale.expr, zero_point.expr, axis=place, out_dtype=str(call.attrs.out_dtype))
    return Value(result, data.order, data.shape)


def _padded(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    attributes = call.attrs
    pairs = np.asarray([int(width) for width in attributes.pad_width]).reshape(-1, 2)
    widths = [int(width) for width in pairs[list(data.order)].reshape(-1)]
    filling = float(attributes.pad_value)
    result = op.nn.pad(data.expr, widths, str(attributes.pad_mode), filling)
    return Value(result, data.order, tuple(shape_of(call)))


def _joined(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    order = leading_order(operands)
    parts = [op.in_order(value, order) for value in operands]
    axis = int(call.attrs.axis) % len(order)
    return Value(op.concat(relax.Tuple(parts), axis=order.index(axis)), order, tuple(shape_of(call)))


def _split(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> list[Value]:
    (data,) = operands
    axis = int(call.attrs.axis) % data.rank
    parts = call.attrs.indices_or_sections
    parts = [int(part) for part in parts] if hasattr(parts, "__len__") else int(parts)
    made = op.split(data.expr, parts, data.order.index(axis))
    shapes = [tuple(int(size) for size in field.shape) for field in call.ty.fields]
    fields = [op.builder.emit(relax.TupleGetItem(made, index)) for index in range(len(shapes))]
    return [Value(field, data.order, shape) for field, shape in zip(fields, shapes, strict=True)]


def _cut(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    axes = [data.order.index(int(axis.value) % data.rank) for axis in call.args[1].fields]
    begin, end, *step = ([int(each.value) for each in argument.fields] for argument in call.args[2:])
    result = op.strided_slice(data.expr, axes, begin, end, *step)
    return Value(result, data.order, tuple(shape_of(call)))


def _order(layout: str) -> tuple[int, ...]:
    """The order of channels first, in places of ``layout``."""
    return tuple(layout.index(axis) for axis in _FIRST)


def _convolved(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    data, weight = operands
    attributes = call.attrs
    is_transposed = call.op.name.endswith("transpose")
    order = _order(attributes.data_layout)
    kernel = "IOHW" if is_transposed else "OIHW"
    weights = op.full(weight, [attributes.kernel_layout.index(axis) for axis in kernel])
    options = {
        "strides": _integers(attributes.strides),
        "padding": _integers(attributes.padding),
        "dilation": _integers(attributes.dilation),
        "groups": int(attributes.groups),
    }
    if is_transposed:
        options["output_padding"] = _integers(attributes.output_padding)
    convolve = op.nn.conv2d_transpose if is_transposed else op.nn.conv2d
    result = convolve(op.full(data, order), weights, **options)
    return Value(result, order, tuple(shape_of(call)))


def _pooled(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    (data,) = operands
    attributes = call.attrs
    order = _order(attributes.layout)
    pool = getattr(op.nn, call.op.name.removeprefix("relax.nn."))
    result = pool(
        op.full(data, order),
        _integers(attributes.pool_size),
        _integers(attributes.strides),
        _integers(attributes.padding),
        _integers(attributes.dilation),
        bool(attributes.ceil_mode),
        bool(attributes.count_include_pad),
    )
    return Value(result, order, tuple(shape_of(call)))


def _resized(op: Arranger, call: relax.Call, operands: Sequence[Value]) -> Value:
    data = operands[0]
    attributes = call.attrs
    order = _order(attributes.layout)
    result = op.image.resize2d(
        op.full(data, order),
        call.args[1],
        [float(each) for each in attributes.roi],
        _FIRST,
        attributes.method,
        attributes.coordinate_transformation_mode,
        attributes.rounding_method,
    )
    return Value(result, order, tuple(shape_of(call)))


def _integers(numbers: Any) -> list[int]:
    return [int(number) for number in numbers]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(("relax.nn.softmax", "relax.nn.log_softmax"), _normalised),
    **dict.fromkeys(("relax.quantize", "relax.dequantize"), _scaled),
    **dict.fromkeys(("relax.nn.conv2d", "relax.nn.conv2d_transpose"), _convolved),
    **dict.fromkeys(("relax.nn.max_pool2d", "relax.nn.avg_pool2d"), _pooled),
    "relax.image.resize2d": _resized,
    "relax.permute_dims": _transposed,
    "relax.nn.pad": _padded,
    "relax.concat": _joined,
    "relax.split": _split,
    "relax.strided_slice": _cut,
}
