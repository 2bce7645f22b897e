"""Build a network in the form that ``tvm_split.model.Model`` guarantees.

Each binding is one operator call, no binding is unused, and every variable is named after its layer. The function
returns a tuple, and at least one layer computes a part of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from relay_passes.fold_constants import folded
from relay_passes.ir import Builder, bindings_of, call_like, constant, is_tensor_constant, operator_name, shape_of
from rpc_runtime.program.specs import TensorSpec
from schedules.cpu.elementary import FUNCTIONS
from tvm_split.errors import ModelImportError
from tvm_split.frontends.names import UniqueNames, identifier
from tvm_split.frontends.operators import Operators, is_float, numbers_of
from tvm_split.frontends.reference import Arranged
from tvm_split.model import Model, Reference

QUANTIZED_TOLERANCE = 0.05
"""The tolerance of quantised networks. Kernels differ in rounding between two steps, and later operators may amplify
one step to several: for one small attention network, LiteRT's own results were 0.02 of their range apart."""


@dataclass(frozen=True)
class Built:
    """A built ``module``, and the ``layers`` of its variables by name.

    ``held`` maps values of the source (an fx node, the name of an ONNX tensor) to the variables that hold them, in
    execution order. If a variable holds several values (a clone), ``held`` has only the first. Axis i of a variable is
    axis ``orders[variable][i]`` of the source's value; without ``orders``, all axes are in the source's order.
    ``empty_layers`` are those of `tvm_split.model.Model`.
    """

    module: tvm.IRModule
    layers: dict[str, str]
    held: dict[Any, str]
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    empty_layers: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The function's parameters."""
        return tuple(_spec(parameter.name, parameter.ty) for parameter in self.module["main"].params)

    def model(
        self,
        name: str,
        framework: str,
        reference: Reference | None = None,
        examples: Sequence[Any] | None = None,
        *,
        outputs: Sequence[str] = (),
        tolerance: float | None = None,
    ) -> Model:
        """Return the Model; ``outputs`` are the names of its outputs, by default ``output_0``, ``output_1``, …."""
        fields = self.module["main"].body.body.ty.fields
        specs = tuple(_spec(f"output_{index}", field) for index, field in enumerate(fields))
        arrays = None if examples is None else tuple(examples)
        if reference is not None and self.orders:
            reference = Arranged(reference, self.orders)
        model = Model(
            identifier(name),
            framework,
            self.module,
            self.inputs,
            specs,
            self.layers,
            reference,
            arrays,
            tolerance,
            empty_layers=self.empty_layers,
        )
        return with_output_names(model, outputs) if outputs else model


def with_output_names(model: Model, names: Sequence[str]) -> Model:
    """Return the model with these names of its outputs; a number is appended to a repeated one."""
    unique = UniqueNames()
    pairs = zip(model.outputs, names, strict=True)
    return replace(model, outputs=tuple(replace(spec, name=unique.take(name)) for spec, name in pairs))


def _spec(name: str, kind: Any) -> TensorSpec:
    return TensorSpec(name, tuple(int(size) for size in kind.shape), str(kind.dtype))


class ModelBuilder(Builder):
    """A block builder that binds every call, also nested ones, to a variable of the current ``layer``.

    Calls on constants are computed at once. Within `main`, set ``outputs``. Quantising belongs to the layer before it,
    and dequantising to each layer that reads it, so that quantised tensors are between layers, and between machines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = ""
        self.layers: dict[str, str] = {}
        self.outputs: Sequence[relax.Expr] = ()
        self._names = UniqueNames()
        self._folded: dict[tuple[object, ...], tuple[relax.Expr, relax.Expr]] = {}
        """Folded expressions and their constants: a weight that two layers share is stored once."""
        self._nested: dict[relax.Expr, relax.Expr] = {}
        """Nested expressions, which several calls may share, and their variables."""
        self._dequantised: dict[str, relax.Call] = {}
        """The calls that dequantise with constants, by the names of their variables."""
        self._dequantised_for: dict[tuple[str, str], relax.Var] = {}
        """Variables for what is dequantised, by its name and the layer that reads it."""

    @contextmanager
    def main(self, inputs: Sequence[TensorSpec]) -> Iterator[list[relax.Var]]:
        """Build the function inside the block; yields its parameters."""
        parameters = [
            relax.Var(self._names.take(identifier(spec.name)), relax.TensorType(list(spec.shape), spec.dtype))
            for spec in inputs
        ]
        with self.function("main", parameters):
            with self.dataflow():
                yield parameters
                fields = self._made_by_layers()
            self.emit_func_output(relax.Tuple(fields))

    def built(self, values: Mapping[Any, Any]) -> Built:
        """Return the network without unused bindings; ``values`` maps the source's values to their expressions."""
        # All variables were emitted as outputs of the block. Those that are not become dataflow variables here.
        module = relax.transform.CanonicalizeBindings()(self.get())
        module = relax.transform.DeadCodeElimination()(module)
        layers = {name: self.layers[name] for name in (binding.var.name for binding in bindings_of(module["main"]))}
        sources: dict[str, Any] = {}
        for source, value in values.items():
            if isinstance(value, relax.Var) and value.name in layers and isinstance(value.ty, relax.TensorType):
                sources.setdefault(value.name, source)
        return Built(module, layers, {source: name for name, source in sources.items()})

    def normalize(self, expr: relax.Expr) -> relax.Expr:
        """Return ``expr`` with its type; calls that are nested in it are bound."""
        if isinstance(expr, relax.If | relax.Function):
            raise ModelImportError("it chooses what to compute while it runs; only straight-line networks can be split")
        if isinstance(expr, relax.Tuple):
            expr = relax.Tuple([self._atom(field) for field in expr.fields])
        elif isinstance(expr, relax.TupleGetItem):
            source = self._atom(expr.tuple_value)
            if isinstance(source, relax.Tuple):
                return source.fields[expr.index]
            expr = relax.TupleGetItem(source, expr.index)
        elif isinstance(expr, relax.Call):
            expr = _with_short_output_padding(expr)
            arguments = [self._atom(argument) for argument in expr.args]
            expr = relax.Call(expr.op, arguments, expr.attrs, expr.ty_args, expr.span)
        return super().normalize(expr)

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Expr:
        """Bind a call to a variable of the current layer; return a call on constants as a constant."""
        expr = self._compilable(self.normalize(expr))
        if not isinstance(expr, relax.Call | relax.TupleGetItem) or operator_name(expr) == "relax.null_value":
            return expr
        value = self._constant(expr)
        return self._bound(expr) if value is None else value

    def match_cast(self, value: relax.Expr, type: relax.Type, name_hint: str = "") -> relax.Expr:
        """Return ``value``, which has this ``type``. Raises ModelImportError if the type is known only at run time."""
        value = self.emit(value)
        if not tvm_ffi.structural_equal(value.ty, type):
            raise ModelImportError(
                "it has a shape that depends on the values of its input; "
                "a split network needs shapes that are known beforehand"
            )
        return value

    def emit_te(self, *arguments: Any, **keywords: Any) -> relax.Var:
        """Raise ModelImportError: an operator emitted as a kernel can be neither planned nor split."""
        raise ModelImportError("TVM imports it as a kernel of its own; a split network is made of Relax operators")

    call_te = emit_te

    def _atom(self, expr: relax.Expr) -> relax.Expr:
        """Return ``expr`` if it needs no binding, else a variable bound to it, or a constant."""
        name = getattr(expr, "name", "")
        if name in self._dequantised and self.layers[name] != self.layer:
            if (name, self.layer) not in self._dequantised_for:
                self._dequantised_for[name, self.layer] = self._bound(self._dequantised[name])
            return self._dequantised_for[name, self.layer]
        if not isinstance(expr, relax.Call | relax.TupleGetItem | relax.Tuple):
            return expr
        if expr not in self._nested:
            self._nested[expr] = self.emit(expr)
        return self._nested[expr]

    def _compilable(self, expr: relax.Expr) -> relax.Expr:
        """Return a call in a dtype in which TVM computes its operator well, converted back to the dtype of ``expr``.

        A reduction of no elements, which TVM's kernels may not write, is a constant. Instead of dividing by the number
        0, which TVM refuses, floats are multiplied by infinity.
        """
        tensors = expr.args if isinstance(expr, relax.Call) else ()
        operator = operator_name(expr)
        if operator in _REDUCTIONS and 0 in shape_of(expr.args[0]):
            dtype = str(expr.ty.dtype)
            return constant(np.full(shape_of(expr), result_of_nothing(operator, dtype), dtype))
        divisor = numbers_of(expr.args[1]) if operator in _QUOTIENTS else None
        if divisor is not None and divisor.ndim == 0 and divisor == 0 and is_float(divisor.dtype.name):
            infinity = np.copysign(np.inf, divisor).astype(divisor.dtype)
            return self.normalize(relax.op.multiply(expr.args[0], constant(infinity)))
        dtype = str(getattr(tensors[0].ty, "dtype", "")) if tensors else ""
        if (operator, dtype) in _COMPOSED:
            return self.normalize(_COMPOSED[operator, dtype](self, expr))
        operators, wider = _WIDER.get(dtype, ((), ""))
        if operator not in operators:
            return expr
        operands = [
            self.emit(relax.op.astype(tensor, wider)) if str(getattr(tensor.ty, "dtype", "")) == dtype else tensor
            for tensor in tensors
        ]
        result = self.normalize(relax.Call(expr.op, operands, expr.attrs, expr.ty_args, expr.span))
        return self.normalize(relax.op.astype(result, dtype)) if str(result.ty.dtype) == wider else result

    def _constant(self, expr: relax.Expr) -> relax.Expr | None:
        if isinstance(getattr(expr.ty, "shape", None), relax.ShapeExpr) and 0 in list(expr.ty.shape):
            # TVM's kernels may refuse tensors without elements.
            return constant(np.empty(shape_of(expr), str(expr.ty.dtype)))
        if not isinstance(expr, relax.Call) or any(isinstance(argument, relax.Var) for argument in expr.args):
            return None
        # TVM objects compare by identity; the expression is kept, so that no other object gets its operands' addresses.
        key = (expr.op, str(expr.attrs), str(expr.ty), *expr.args)
        if key not in self._folded:
            value = folded(expr)
            if value is None:
                return None
            self._folded[key] = expr, constant(value)
        return self._folded[key][1]

    def _bound(self, expr: relax.Expr) -> relax.Var:
        layer, operator = self.layer, operator_name(expr)
        is_fixed = operator in (_DEQUANTIZE, _QUANTIZE) and all(map(is_tensor_constant, expr.args[1:]))
        if is_fixed and operator == _QUANTIZE:
            layer = self.layers.get(getattr(expr.args[0], "name", ""), layer)
        variable = super().emit_output(expr, self._names.take(identifier(layer)))
        self.layers[variable.name] = layer
        if is_fixed and operator == _DEQUANTIZE:
            self._dequantised[variable.name] = expr
        return variable

    def _made_by_layers(self) -> list[relax.Expr]:
        """Make each constant output a layer ``output_N``, since some machine must hold it.

        An input that is returned unchanged becomes a layer only if the model has no other layer.
        """
        is_made = [isinstance(output, relax.Var) and bool(self.layers) for output in self.outputs]
        fields = []
        for index, (output, is_kept) in enumerate(zip(self.outputs, is_made, strict=True)):
            self.layer = f"output_{index}"
            fields.append(output if is_kept else self._bound(relax.op.reshape(output, output.ty.shape)))
        return fields


def _with_short_output_padding(call: relax.Call) -> relax.Call:
    """Return ``call``; a transposed convolution with an output padding below its strides, since TVM refuses others.

    The end of the result is cropped less instead, and zeros are appended.
    """
    if not operator_name(call).endswith("_transpose"):
        return call
    strides, pads, extra = ([*map(int, getattr(call.attrs, name))] for name in ("strides", "padding", "output_padding"))
    allowed = [min(width, stride - 1) for width, stride in zip(extra, strides, strict=True)]
    if allowed == extra:
        return call
    axes = len(extra)
    afters = [pad - width + kept for pad, width, kept in zip(pads[axes:], extra, allowed, strict=True)]
    cropped = [*pads[:axes], *(max(after, 0) for after in afters)]
    result = call_like(call, call.args, padding=cropped, output_padding=allowed)
    zeros = [width for after in afters for width in (0, max(-after, 0))]
    return relax.op.nn.pad(result, [0] * 4 + zeros) if any(zeros) else result


def _row_norm(builder: ModelBuilder, call: relax.Call) -> relax.Expr:
    op, (data, weight, bias) = Operators(builder), call.args
    axes = [int(axis) for axis in call.attrs.axes]
    return op.add(op.multiply(_normalized(op, data, axes, call.attrs.epsilon), weight), bias)


def _group_norm(builder: ModelBuilder, call: relax.Call) -> relax.Expr:
    op, (data, weight, bias) = Operators(builder), call.args
    shape, axis = shape_of(data), int(call.attrs.channel_axis)
    groups = op.reshape(data, [*shape[:axis], int(call.attrs.num_groups), -1, *shape[axis + 1 :]])
    axes = [axis + 1, *(int(place) + (place > axis) for place in call.attrs.axes)]
    result = op.reshape(_normalized(op, groups, axes, call.attrs.epsilon), shape)
    weight, bias = (op.reshape(part, [-1] + [1] * (len(shape) - axis - 1)) for part in (weight, bias))
    return op.add(op.multiply(result, weight), bias)


def _normalized(op: Operators, data: relax.Expr, axes: list[int], epsilon: float) -> relax.Expr:
    centred = op.subtract(data, op.mean(data, axes, keepdims=True))
    variance = op.mean(op.square(centred), axes, keepdims=True)
    return op.multiply(centred, op.rsqrt(op.add(variance, epsilon)))


def _zero_like(call: relax.Call) -> relax.Expr:
    return constant(np.zeros((), str(call.ty.dtype)))


def _sign_of_unsigned(builder: ModelBuilder, call: relax.Call) -> relax.Expr:
    return relax.op.astype(builder.emit(relax.op.greater(call.args[0], _zero_like(call))), str(call.ty.dtype))


def result_of_nothing(operator: str, dtype: str) -> float:
    """Return a reduction of no elements: 0 for a sum, NaN for a mean, the least number of a dtype for a maximum."""
    if operator in _OF_NOTHING:
        return _OF_NOTHING[operator]
    is_least = operator == "relax.max"
    if dtype == "bool":
        return not is_least
    if np.issubdtype(np.dtype(dtype), np.integer):
        return int(np.iinfo(dtype).min if is_least else np.iinfo(dtype).max)
    return -np.inf if is_least else np.inf


_QUANTIZE, _DEQUANTIZE = "relax.quantize", "relax.dequantize"
_OF_NOTHING = {"relax.sum": 0, "relax.prod": 1, "relax.mean": np.nan}
_REDUCTIONS = (*_OF_NOTHING, "relax.max", "relax.min")
_QUOTIENTS = ("relax.divide", "relax.floor_divide")
_PLACES = ("relax.argmax", "relax.argmin")
_SCATTERS = ("relax.scatter_elements", "relax.scatter_nd")
_COMPARING = "isnan sign max min maximum minimum equal not_equal less less_equal greater greater_equal"
_ACCUMULATING = (
    *_OF_NOTHING, "relax.variance", "relax.std", "relax.vision.roi_align",
    *(f"relax.image.{name}" for name in ("grid_sample", "resize2d", "resize3d")),
    *(f"relax.nn.{kind}avg_pool{axes}d" for kind in ("", "adaptive_") for axes in (1, 2, 3)),
    *(f"relax.nn.{kind}_norm" for kind in ("layer", "group", "instance", "rms")),
    *(f"relax.nn.{name}" for name in ("softmax", "log_softmax", "attention", "attention_bias")),
)  # fmt: skip
"""Operators that TVM accumulates in the dtype of their result. Sources accumulate half precision in float32."""
_CLASSES = ("relax.isnan", "relax.isinf", "relax.isfinite")
_WIDER: Mapping[str, tuple[Sequence[str], str]] = {
    "bool": ((*_PLACES, *_SCATTERS, *(f"relax.{name}" for name in _COMPARING.split())), "int8"),
    "bfloat16": ((*_PLACES, "relax.mod", *_CLASSES, *FUNCTIONS, *_ACCUMULATING), "float32"),
    "float16": ((*FUNCTIONS, *_ACCUMULATING), "float32"),
}
"""Dtype → the operators that TVM lacks or computes too coarsely in it, and a dtype with all its numbers for them."""
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_COMPOSED: Mapping[tuple[str, str], Callable[[ModelBuilder, relax.Call], relax.Expr]] = {
    ("relax.nn.layer_norm", "float64"): _row_norm,
    ("relax.nn.group_norm", "float64"): _group_norm,
    **{("relax.sign", dtype): _sign_of_unsigned for dtype in _UNSIGNED},
    **{
        ("relax.negative", dtype): lambda _, call: relax.op.subtract(_zero_like(call), call.args[0])
        for dtype in _UNSIGNED
    },
}
"""By operator and dtype, functions that compose a call of other operators, where TVM's lowering or folding fails."""
