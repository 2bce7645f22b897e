"""Describe a model's layers (dependencies, operations, weights) as plain data, so that planners import no TVM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import (
    bindings_of,
    is_tensor_constant,
    main_function,
    operator_name,
    returned_fields,
    shape_of,
    used_variables,
)
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.specs import TensorSpec
from tvm_split.planner.graph import Call, LayerGraph, ModelDescription, Value

if TYPE_CHECKING:
    from tvm_split.model import Model


def describe(model: Model) -> ModelDescription:
    """Return a model's layer graph with the calls and the weight bytes of each layer."""
    costs: dict[str, list[Call]] = {layer: [] for layer in model.layer_names}
    weights = dict.fromkeys(model.layer_names, 0)
    for name, work, moved in calls(model.module):
        if name in model.layers:
            costs[model.layers[name]].append(Call(work, moved))
    for binding in bindings_of(main_function(model.module)):
        layer = model.layers.get(binding.var.name)
        if layer is not None and isinstance(binding.value, relax.Call):
            constants = [operand for operand in binding.value.args if is_tensor_constant(operand)]
            weights[layer] += sum(size_bytes(constant.ty) for constant in constants)
    return ModelDescription(
        model.name, model.graph, {layer: tuple(of_layer) for layer, of_layer in costs.items()}, weights
    )


def layer_graph(model: Model) -> LayerGraph:
    """Build the graph of a model's layers. A model caches it as ``model.graph``."""
    function = main_function(model.module)
    bindings = [binding for binding in bindings_of(function) if binding.var.name in model.layers]
    inputs = {parameter.name for parameter in function.params}
    returned = {getattr(field, "name", "") for field in returned_fields(function)}
    depends_on_input = set(inputs)
    consumers: dict[str, set[str]] = {}
    predecessors: dict[str, set[str]] = {layer: set() for layer in model.layer_names}
    for binding in bindings:
        layer = model.layers[binding.var.name]
        for used in used_variables(binding.value):
            if used.name in depends_on_input:
                depends_on_input.add(binding.var.name)
            if used.name in inputs or used.name in model.layers:
                consumers.setdefault(used.name, set()).add(layer)
            if model.layers.get(used.name, layer) != layer:
                predecessors[layer].add(model.layers[used.name])
    # A returned tensor must be made by some stage, so its layer counts even if it depends on no input.
    dependent = {layer for name, layer in model.layers.items() if name in depends_on_input or name in returned}
    independent = frozenset(model.layer_names) - dependent
    return LayerGraph(
        layers=model.layer_names,
        predecessors={layer: frozenset(before - independent) for layer, before in predecessors.items()},
        independent=independent,
        values=tuple(
            Value(
                size_bytes(binding.var.ty),
                model.layers[name],
                # A value that depends on no input is not transferred: each stage computes it again.
                frozenset(consumers.get(name, ()) if name in depends_on_input else ()),
                name,
                name in returned,
                isinstance(binding.var.ty, relax.TensorType),
            )
            for binding in bindings
            if (name := binding.var.name) in returned or (name in depends_on_input and name in consumers)
        ),
        inputs=tuple(
            Value(size_bytes(parameter.ty), CLIENT, frozenset(consumers.get(name, ())), name, name in returned)
            for parameter in function.params
            if (name := parameter.name)
        ),
        empty_layers=model.empty_layers,
    )


def calls(module: tvm.IRModule) -> Iterator[tuple[str, float, int]]:
    """Yield the variable, the floating-point operations and the bytes of operands and results of every call."""
    for binding in bindings_of(main_function(module)):
        call = binding.value
        result = tensors_in(call.ty) if isinstance(call, relax.Call) else []
        if result:
            operands = [tensor for argument in call.args for tensor in tensors_in(argument.ty)]
            work = operations(operator_name(call), [shape_of(operand) for operand in operands], shape_of(result[0]))
            yield binding.var.name, work, sum(size_bytes(tensor) for tensor in [*result, *operands])


def operations(operator: str, operands: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> float:
    """Floating-point operations of one call; a multiplication and an addition count as two."""
    size = math.prod(result)
    if operator.startswith("relax.nn.conv") and "transpose" not in operator:
        return 2.0 * size * math.prod(operands[1][1:])
    if operator.startswith("relax.nn.conv"):
        return 2.0 * math.prod(operands[0]) * math.prod(operands[1][1:])
    if operator == "relax.matmul":
        return 2.0 * size * operands[0][-1]
    if operator.startswith("relax.nn.attention"):
        batch, queries, heads, width = operands[0]
        return 4.0 * batch * heads * queries * operands[1][1] * width
    return float(size)


def tensors_in(value_type: relax.Type) -> list[relax.TensorType]:
    """The tensor types in a type, including those in tuples."""
    if isinstance(value_type, relax.TensorType):
        return [value_type]
    if isinstance(value_type, relax.TupleType):
        return [tensor for field in value_type.fields for tensor in tensors_in(field)]
    return []


def tensor_spec(name: str, tensor: relax.TensorType) -> TensorSpec:
    """Return name, shape and dtype of a tensor type with a static shape."""
    return TensorSpec(name, shape_of(tensor), str(tensor.dtype))


def size_bytes(value_type: relax.Type) -> int:
    """Bytes of all tensors in a type."""
    return sum(math.prod(shape_of(tensor)) * np.dtype(str(tensor.dtype)).itemsize for tensor in tensors_in(value_type))
