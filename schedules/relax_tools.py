"""Read Relax expressions, helpers that all lowerings share, and a mutator that records added variables' origins."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.relax import BlockBuilder
from tvm.relax.expr_functor import PyExprMutator

from schedules.traits import Traits

Legalization = Callable[[BlockBuilder, relax.Call], relax.Expr]
"""A function that lowers an operator, in the form that ``relax.transform.LegalizeOps`` takes."""

CONV1D, CONV2D = "relax.nn.conv1d", "relax.nn.conv2d"
PLAIN_LAYOUTS = {
    f"relax.nn.conv{len(axes)}d{end}": (f"NC{axes}", f"{kernel}{axes}", f"NC{axes}")
    for axes in ("W", "HW", "DHW")
    for end, kernel in (("", "OI"), ("_transpose", "IO"))
}
NUMPY_TYPES = frozenset(["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"])

ORIGINS_ATTRIBUTE = "tvm_split.origins"
"""Attribute of a Relax function: maps each variable that this package's passes added to the variable it stands for."""

FUSABLE = {"op_pattern": 4}
"""PrimFunc attributes with relax's OpPatternKind: elementwise functions that follow are fused into this one."""


def operator_of(expression: Any) -> str:
    """Return the name of the operator that an expression calls (``relax.add``), or an empty string."""
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name)
    return ""


def static_shape(expression: relax.Expr) -> tuple[int, ...] | None:
    """Return the shape of a tensor if every extent is a known integer; None for symbolic extents and other values."""
    values = getattr(getattr(expression.ty, "shape", None), "values", None)
    if values is None or not all(isinstance(value, tirx.IntImm) for value in values):
        return None
    return tuple(int(value) for value in values)


def array_of(expression: relax.Expr) -> Any:
    """Return a constant's numpy array, not copied; None for other expressions and for dtypes that numpy lacks."""
    if not isinstance(expression, tvm.ir.GenericConst) or not isinstance(expression.value, tvm.runtime.Tensor):
        return None
    if str(expression.value.dtype) not in NUMPY_TYPES:
        return None
    return np.from_dlpack(expression.value)


def widened_array_of(expression: relax.Expr) -> Any:
    """Return a constant's numpy array like `array_of`; bfloat16 values are converted to float32."""
    if not isinstance(expression, tvm.ir.GenericConst) or not isinstance(expression.value, tvm.runtime.Tensor):
        return None
    tensor = expression.value
    if str(tensor.dtype) != "bfloat16":
        return array_of(expression)
    halves = np.from_dlpack(tensor._create_view(tensor.shape, "uint16"))
    return (halves.astype("uint32") << 16).view("float32")


def constant(array: np.ndarray) -> relax.Expr:
    """Return a constant with the array's own dtype; ``relax.const`` would convert float64 to float32."""
    return relax.const(array, array.dtype.name)


def is_plain(call: relax.Call) -> bool:
    """Return whether a convolution's data, weight and result have the layouts that the frontends produce."""
    layouts = tuple(str(getattr(call.attrs, name)) for name in ("data_layout", "kernel_layout", "out_layout"))
    return layouts == PLAIN_LAYOUTS.get(operator_of(call))


def window_of(call: relax.Call) -> dict[str, Any]:
    """Return a convolution's strides, padding, dilation and dtype, as keywords to build another convolution."""
    window = {
        name: [int(number) for number in getattr(call.attrs, name)] for name in ("strides", "padding", "dilation")
    }
    return {**window, "out_dtype": call.attrs.out_dtype}


def pool_of(call: relax.Call) -> dict[str, Any]:
    """Return a pooling's window and edge handling, as keywords to build another pooling."""
    sizes = ("pool_size", "strides", "padding", "dilation")
    window = {name: [int(number) for number in getattr(call.attrs, name)] for name in sizes}
    return {**window, **{name: bool(getattr(call.attrs, name)) for name in ("ceil_mode", "count_include_pad")}}


def broadcast_index(index: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """Return the indices into a tensor of ``shape``, from the indices of the result that it is broadcast to."""
    operand_index = index[len(index) - len(shape) :]
    return [0 if extent == 1 else value for value, extent in zip(operand_index, shape, strict=True)]


def ravel(index: Sequence[Any], extents: Sequence[int]) -> Any:
    """Return the position of an element in row-major order."""
    place: Any = 0
    for value, extent in zip(index, extents, strict=True):
        place = place * extent + value
    return place


def unravel(place: Any, extents: Sequence[int]) -> list[Any]:
    """Return the indices of the element at a position in row-major order."""
    index: list[Any] = []
    for extent in reversed(extents[1:]):
        index.append(place % extent)
        place = place // extent
    return [*([place] if extents else []), *reversed(index)]


def default_legalization(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return TVM's lowering of the operator, or the call itself if TVM has none."""
    legalize = call.op.get_attr("FLegalize")
    return call if legalize is None else legalize(builder, call)


def legalize_elements(
    builder: BlockBuilder, name: str, operands: Sequence[relax.Expr], element: Callable[..., Any]
) -> relax.Expr:
    """Lower to ``element`` of each element of an operand, or of several operands that are broadcast."""

    def compute(*tensors: te.Tensor) -> te.Tensor:
        if len(tensors) == 1:
            return te.compute(tensors[0].shape, lambda *index: element(tensors[0][index]), name=name)
        shapes = [tuple(map(int, tensor.shape)) for tensor in tensors]

        def combined(*index: Any) -> Any:
            places = (tuple(broadcast_index(index, shape)) for shape in shapes)
            return element(*(tensor[place] for tensor, place in zip(tensors, places, strict=True)))

        return te.compute(np.broadcast_shapes(*shapes), combined, name=name)

    return builder.call_te(compute, *operands, primfunc_name_hint=name)


def default_convolution(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return TVM's lowering of a convolution, with sums in `accumulator_dtype`; TVM sums in the dtype of the result."""
    dtype = str(call.ty.dtype)
    if accumulator_dtype(dtype) == dtype:
        return default_legalization(builder, call)
    operator = getattr(relax.op.nn, operator_of(call).rsplit(".", 1)[-1])
    options = {name: getattr(call.attrs, name) for name in [*signature(operator).parameters][2:]}
    wide = operator(*call.args, **{**options, "out_dtype": accumulator_dtype(dtype)})
    return builder.call_te(topi.cast, builder.emit(default_legalization(builder, builder.normalize(wide))), dtype)


def legalize_matmul(builder: BlockBuilder, call: relax.Call, compute: Callable[..., te.Tensor]) -> relax.Expr:
    """Lower a product by ``compute``, which also takes ``out_dtype``; vectors and symbolic shapes are left to TVM."""
    shapes = [static_shape(argument) for argument in call.args]
    if any(shape is None or len(shape) < 2 or 0 in shape for shape in shapes):
        return default_legalization(builder, call)
    product = partial(compute, out_dtype=str(call.ty.dtype))
    return builder.call_te(product, *call.args, primfunc_name_hint="matmul", primfunc_attrs=FUSABLE)


def _legalize_take(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower ``relax.take``; in the mode that checks no index, as TVM does, but without its warning."""
    if str(call.attrs.mode) != "fast":
        return builder.call_te(topi.take, *call.args, call.attrs.axis, mode=call.attrs.mode)

    def compute(data: te.Tensor, places: te.Tensor) -> te.Tensor:
        extents, count = list(data.shape), len(places.shape)
        if call.attrs.axis is None:
            return te.compute(places.shape, lambda *index: data(*unravel(places(*index), extents)), name="T_take")
        axis = int(call.attrs.axis) % len(extents)

        def element(*index: Any) -> Any:
            place = places(*index[axis : axis + count])
            return data(*index[:axis], place, *index[axis + count :])

        return te.compute([*extents[:axis], *places.shape, *extents[axis + 1 :]], element, name="T_take")

    return builder.call_te(compute, *call.args, primfunc_name_hint="take")


# Replaces TVM's lowering, registered at level 10, which warns each time that FoldConstant sees a `take`.
tvm.ir.register_op_attr("relax.take", "FLegalize", _legalize_take, level=11)


def accumulator_dtype(out_dtype: str) -> str:
    """Return the dtype to accumulate in: float32 for half precision, where 1000 terms would lose three digits."""
    return "float32" if out_dtype in ("float16", "bfloat16") else out_dtype


def origins_of(function: relax.Function) -> dict[str, str]:
    """Return, by the name of each added variable, the name of the original variable that it stands for."""
    origins = {} if function.attrs is None else function.attrs.get(ORIGINS_ATTRIBUTE, {})
    return {str(name): str(origin) for name, origin in origins.items()}


class ModuleMutator(PyExprMutator):  # type: ignore[misc]
    """A mutator that is applied to every Relax function of a module; subclasses also need TVM's ``@mutator``.

    ``name`` is the name of the variable whose value is being rewritten.
    """

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.module = module
        self.name = ""
        self._origins: dict[str, str] = {}
        self._taken: set[str] = set()

    def transform(self) -> tvm.IRModule:
        for variable, function in self.module.functions_items():
            if isinstance(function, relax.Function):
                self._origins = origins_of(function)
                self._taken = {binding.var.name for block in function.body.blocks for binding in block.bindings}
                self._taken |= {parameter.name for parameter in function.params}
                rewritten = self.visit_expr(function).with_attr(ORIGINS_ATTRIBUTE, self._origins)
                self.builder_.update_func(variable, rewritten)
        return self.builder_.get()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.name = binding.var.name
        super().visit_var_binding_(binding)

    def emit_beside(self, expression: relax.Expr, word: str, origin: str | None = None) -> relax.Var:
        """Emit a binding ``{origin}_{word}`` before the current one; ``origin`` is by default the current variable."""
        origin = origin or self.name
        free = (f"{origin}_{word}{number or ''}" for number in itertools.count())
        variable = self.builder_.emit(expression, name_hint=next(name for name in free if name not in self._taken))
        self._taken.add(variable.name)
        self._origins[variable.name] = self._origins.get(origin, origin)
        return variable


class TraitsMutator(ModuleMutator):
    """A `ModuleMutator` for a target with these traits."""

    def __init__(self, module: tvm.IRModule, traits: Traits) -> None:
        super().__init__(module)
        self.traits = traits
