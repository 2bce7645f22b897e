"""Fold affine: fold per-channel scales and shifts behind a convolution or matrix product into its weights.

    conv(x, W) + b, then batch norm  ──▶  conv(x, W·s) + t

Requires: batch norm decomposed into arithmetic, constants folded.
Ensures: a convolution or matrix product with constant weights and the chain behind it become one product with scaled
weights and one addition. A chain has add, subtract, multiply and divide by constants of one value per output channel.

TVM's own `FoldBatchnormToConv2D` supports only a batch norm directly behind a convolution. Importers write a
convolution's bias as a separate addition between the two.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import (
    PLAIN_LAYOUTS,
    array_of,
    bindings_of,
    call_like,
    constant,
    is_tensor_constant,
    main_function,
    operator_name,
    returned_fields,
    rewrite_main,
    shape_of,
    used_variables,
)

# Operator → (axis of the output's channels from the end, axis of the weight's output channels)
_PRODUCTS = {"relax.nn.conv1d": (2, 0), "relax.nn.conv2d": (3, 0), "relax.nn.conv3d": (4, 0), "relax.matmul": (1, -1)}
_FOLDED_TYPES = ("float32", "float64")


@tvm.transform.module_pass(opt_level=0, name="FoldAffine")  # type: ignore[untyped-decorator]
def fold_affine(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    """Fold scales and shifts into the weights before them, in the function ``main``."""
    function = main_function(module)
    chains = _find_chains(function)
    if not chains:
        return module
    starts = {chain.members[0]: chain for chain in chains.values()}
    products: dict[str, relax.Var] = {}

    def replacement(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
        if name in starts:
            products[name] = builder.emit(_scaled(expression, starts[name]), name_hint=name)
            return products[name]
        # Operations inside a chain are emitted unchanged and removed later as dead code.
        return _shifted(name, products[chains[name].members[0]], chains[name], builder) if name in chains else None

    return relax.transform.DeadCodeElimination(["main"])(rewrite_main(module, replacement))


@dataclass
class _Chain:
    """A product and the arithmetic behind it: its value is ``scale · product + shift``, both per output channel.

    ``members`` are the names of its variables, from the product to the last one.
    """

    operator: str
    scale: np.ndarray
    shift: np.ndarray
    members: list[str] = field(default_factory=list)


def _find_chains(function: relax.Function) -> dict[str, _Chain]:
    """Return the chains that save an operation or have a scale, by the name of their last variable."""
    values = [*(binding.value for binding in bindings_of(function)), *returned_fields(function)]
    uses = Counter(used.name for value in values for used in used_variables(value))
    ends: dict[str, _Chain] = {}
    for binding in bindings_of(function):
        value = binding.value
        operator = operator_name(value)
        if operator in _PRODUCTS and _is_foldable(value, operator):
            channels = int(binding.var.ty.shape.values[-_PRODUCTS[operator][0]])
            ends[binding.var.name] = _Chain(operator, np.ones(channels), np.zeros(channels), [binding.var.name])
            continue
        step = _affine_step(value, ends, uses)
        if step is not None:
            chain, scale, shift = step
            del ends[chain.members[-1]]
            chain.scale, chain.shift = chain.scale * scale, chain.shift * scale + shift
            chain.members.append(binding.var.name)
            ends[binding.var.name] = chain
    return {name: chain for name, chain in ends.items() if len(chain.members) > 2 or (chain.scale != 1).any()}


def _is_foldable(call: relax.Call, operator: str) -> bool:
    if str(call.ty.dtype) not in _FOLDED_TYPES or not is_tensor_constant(call.args[1]):
        return False
    if operator == "relax.matmul":
        return len(call.args[1].ty.shape.values) == 2
    data, kernel = PLAIN_LAYOUTS[operator]
    return (str(call.attrs.data_layout), str(call.attrs.kernel_layout)) == (data, kernel) and str(
        call.attrs.out_layout
    ) in ("", data)


def _affine_step(
    value: relax.Expr, ends: dict[str, _Chain], uses: Counter[str]
) -> tuple[_Chain, np.ndarray, np.ndarray] | None:
    """Return the chain that a call continues and the scale and shift of the call; None if it continues none."""
    operator = operator_name(value)
    if operator not in ("relax.add", "relax.subtract", "relax.multiply", "relax.divide"):
        return None
    left, right = value.args
    swapped = is_tensor_constant(left)
    variable, constant = (right, left) if swapped else (left, right)
    if not isinstance(variable, relax.Var) or not is_tensor_constant(constant):
        return None
    chain = ends.get(variable.name)
    if chain is None or uses[variable.name] != 1 or (operator == "relax.divide" and swapped):
        return None
    if shape_of(value) != shape_of(variable):
        return None
    channel_axis = _PRODUCTS[chain.operator][0]
    numbers = _per_channel(constant.value.numpy(), len(chain.scale), channel_axis)
    if numbers is None:
        return None
    ones, zeros = np.ones_like(numbers), np.zeros_like(numbers)
    if operator == "relax.add":
        return chain, ones, numbers
    if operator == "relax.subtract":
        return (chain, -ones, numbers) if swapped else (chain, ones, -numbers)
    return (chain, numbers, zeros) if operator == "relax.multiply" else (chain, 1.0 / numbers, zeros)


def _per_channel(array: np.ndarray, channels: int, axis_from_end: int) -> np.ndarray | None:
    """Return the array as one float64 per channel, or None if it varies along another axis."""
    if array.size == 1:
        return np.full(channels, float(array.reshape(-1)[0]))
    if array.size != channels or array.ndim < axis_from_end or array.shape[-axis_from_end] != channels:
        return None
    return array.reshape(-1).astype(np.float64)


def _scaled(call: relax.Call, chain: _Chain) -> relax.Call:
    """Return the product with the chain's scales multiplied into its weights."""
    weight = array_of(call.args[1])
    along = [1] * weight.ndim
    along[_PRODUCTS[chain.operator][1]] = -1
    scaled = (weight.astype(np.float64) * chain.scale.reshape(along)).astype(weight.dtype)
    return call_like(call, [call.args[0], constant(scaled)])


def _shifted(name: str, product: relax.Var, chain: _Chain, builder: relax.BlockBuilder) -> relax.Expr:
    if not chain.shift.any():
        return product
    trailing = _PRODUCTS[chain.operator][0] - 1
    # The shift has the result's rank, so that later layout passes need not handle broadcasting.
    shape = [1, -1] + [1] * trailing if trailing else [-1]
    shift = chain.shift.astype(str(product.ty.dtype)).reshape(shape)
    return builder.emit(relax.op.add(product, constant(shift)), name_hint=name)
