"""`Model`: a trained network in one form, independent of its source framework."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import tvm
from tvm import relax

from relay_passes.costs import calls, size_bytes
from relay_passes.ir import array_of, bindings_of, is_tensor_constant, main_function, returned_fields, used_variables
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.specs import TensorSpec
from tvm_split.errors import PlanError
from tvm_split.placement.graph import Call, LayerGraph, ModelDescription, Value
from tvm_split.units import Shown


class Reference(Protocol):
    """The source framework, which computes the reference values of a model.

    A class may also have a method ``precise``, which is ``outputs`` in float64 instead of float32, and may raise.
    """

    def outputs(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return the model's outputs for these inputs, computed by the source framework."""

    def values(self, inputs: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names of variables in ``Model.module`` with their values in the source framework, in execution order.

        Only variables that correspond to one tensor of the source are included.
        """


SCALAR = re.compile(r'R\.const\(.*?, ("\w+")\)')
"""A scalar in the text of a module, which shows the values of scalars but not those of other weights."""

AnnotatedSplit = Callable[[str | None, Sequence[str]], Mapping[str, Sequence[str]]]
"""Function from a configuration name (None: the only one) and the cluster's machines to layers by machine."""


@dataclass(frozen=True, repr=False)
class Model(Shown):
    """A network as one Relax module.

    ``module`` has one function, ``main``: a single dataflow block over static shapes, whose parameters are the model's
    inputs (weights are bound as constants) and which returns a tuple with one tensor per model output.

    ``layers`` maps every variable that ``main`` binds to the name of its source layer (torch module path, ONNX node
    name, JAX scopes, Keras layers). Its keys are the variables' name hints, which are unique.

    ``tolerance`` is the largest difference from the reference, relative to the largest magnitude, if the source is less
    precise than its dtypes: quantised networks are rounded after each operator.

    ``empty_layers`` are names of the source for which nothing is computed (a dropout, an identity, a folded constant),
    each with the layer that computes its result, or "" if there is none. It may also have names that are in ``layers``.

    ``annotated_split`` reads a split from annotations of the source, if its format supports them.
    """

    name: str
    framework: str
    module: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: Mapping[str, str]
    reference: Reference | None = field(default=None, compare=False)
    example_inputs: tuple[np.ndarray, ...] | None = field(default=None, compare=False)
    tolerance: float | None = field(default=None, compare=False)
    annotated_split: AnnotatedSplit | None = field(default=None, compare=False)
    empty_layers: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of all layers, each once, in the order of execution."""
        return tuple(dict.fromkeys(self.layers.values()))

    def split_of_source(self, wanted: str, machines: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the layers by machine from the source's annotations.

        Args:
            wanted: ``source`` or ``source:CONFIGURATION``.
            machines: names of the cluster's machines.

        Raises:
            PlanError: the source has no annotations, or they give no split for these machines.
        """
        if self.annotated_split is None:
            raise PlanError(f"split is {wanted!r}, and only ONNX models have annotations of devices; name the layers")
        split = self.annotated_split(wanted.partition(":")[2] or None, machines)
        return {machine: tuple(layers) for machine, layers in split.items()}

    @cached_property
    def graph_digest(self) -> str:
        """The SHA-256 of the graph, its shapes and its layers, without the values of the weights."""
        content = {
            "inputs": [asdict(spec) for spec in self.inputs],
            "outputs": [asdict(output) for output in self.outputs],
            "layers": dict(self.layers),
            "graph": SCALAR.sub(r"R.const(\1)", self.module.script(show_meta=False)),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the graph and the weights."""
        digest = hashlib.sha256(self.graph_digest.encode())

        def add(expression: relax.Expr) -> None:
            if is_tensor_constant(expression):
                values = array_of(expression)
                digest.update(f"{values.dtype}{values.shape}".encode())
                digest.update(values.reshape(-1).view(np.uint8).data)

        relax.analysis.post_order_visit(main_function(self.module), add)
        return digest.hexdigest()

    @cached_property
    def graph(self) -> LayerGraph:
        layers, layer_names = self.layers, self.layer_names
        function = main_function(self.module)
        bindings = [binding for binding in bindings_of(function) if binding.var.name in layers]
        inputs = {parameter.name for parameter in function.params}
        returned = {getattr(field, "name", "") for field in returned_fields(function)}
        depends_on_input = set(inputs)
        consumers: dict[str, set[str]] = {}
        predecessors: dict[str, set[str]] = {layer: set() for layer in layer_names}
        for binding in bindings:
            layer = layers[binding.var.name]
            for used in used_variables(binding.value):
                if used.name in depends_on_input:
                    depends_on_input.add(binding.var.name)
                if used.name in inputs or used.name in layers:
                    consumers.setdefault(used.name, set()).add(layer)
                if layers.get(used.name, layer) != layer:
                    predecessors[layer].add(layers[used.name])
        # A returned tensor must be made by some stage, so its layer counts even if it depends on no input.
        dependent = {layer for name, layer in layers.items() if name in depends_on_input or name in returned}
        independent = frozenset(layer_names) - dependent
        return LayerGraph(
            layers=layer_names,
            predecessors={layer: frozenset(before - independent) for layer, before in predecessors.items()},
            independent=independent,
            values=tuple(
                Value(
                    size_bytes(binding.var.ty),
                    layers[name],
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
            empty_layers=self.empty_layers,
        )

    @cached_property
    def description(self) -> ModelDescription:
        """The layer graph with the calls and the weight bytes of each layer; plain data, since planners load no TVM."""
        costs: dict[str, list[Call]] = {layer: [] for layer in self.layer_names}
        weights = dict.fromkeys(self.layer_names, 0)
        for variable, work, moved in calls(self.module):
            if variable in self.layers:
                costs[self.layers[variable]].append(Call(work, moved))
        for binding in bindings_of(main_function(self.module)):
            layer = self.layers.get(binding.var.name)
            if layer is not None and isinstance(binding.value, relax.Call):
                constants = [operand for operand in binding.value.args if is_tensor_constant(operand)]
                weights[layer] += sum(size_bytes(constant.ty) for constant in constants)
        return ModelDescription(
            self.name, self.graph, {layer: tuple(of_layer) for layer, of_layer in costs.items()}, weights
        )
