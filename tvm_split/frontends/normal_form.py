"""Bring an imported function into the normal form that ``tvm_split.model.Model`` guarantees.

Each binding is one operator call, no binding is unused, and every variable is named after its layer. The function
returns a tuple, and at least one layer computes a part of it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError

_WORDS_OF_TVMSCRIPT = frozenset({"R", "T", "I", "tir", "relax", "cls", "main"})


def identifier(layer: str) -> str:
    """Return a valid Python and TVMScript identifier similar to ``layer``: ``layer1.0.conv1`` → ``layer1_0_conv1``."""
    name = re.sub(r"\W+", "_", layer, flags=re.ASCII).strip("_") or "value"
    if name[0].isdigit():
        name = f"layer_{name}"
    if keyword.iskeyword(name) or name in _WORDS_OF_TVMSCRIPT:
        name = f"{name}_"
    return name


class UniqueNames:
    """Make names unique: the second ``conv`` becomes ``conv_1``."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        name = wanted
        while name in self._taken:
            self._counts[wanted] = self._counts.get(wanted, 0) + 1
            name = f"{wanted}_{self._counts[wanted]}"
        self._taken.add(name)
        return name


@dataclass(frozen=True)
class NormalForm:
    """A module in normal form, the ``layers`` of its variables, and the new names of the importer's variables.

    ``renamed`` maps the importer's variable names to the names of the variables that hold the same value now. It lacks
    variables that became an input or a constant, or were removed.
    """

    module: tvm.IRModule
    layers: dict[str, str]
    renamed: dict[str, str]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The function's parameters."""
        return tuple(_spec(parameter.name, parameter.ty) for parameter in self.module["main"].params)

    def outputs(self, names: Sequence[str] = ()) -> tuple[TensorSpec, ...]:
        """The function's outputs with ``names``, by default ``output_0``, ``output_1``, …."""
        fields = self.module["main"].body.body.ty.fields
        names = names or [f"output_{index}" for index in range(len(fields))]
        return tuple(_spec(name, field) for name, field in zip(names, fields, strict=True))

    def variables(self, held: Mapping[str, Any]) -> dict[Any, str]:
        """Map the source's values that the importer ``held`` to variables; of several in one (a clone), the first."""
        first: dict[str, Any] = {}
        for old, source in held.items():
            if old in self.renamed:
                first.setdefault(self.renamed[old], source)
        return {source: variable for variable, source in first.items()}


def _spec(name: str, kind: Any) -> TensorSpec:
    return TensorSpec(name, tuple(int(size) for size in kind.shape), str(kind.dtype))


def normal_form(function: relax.Function, layers: Mapping[str, str], input_names: Sequence[str]) -> NormalForm:
    """Rewrite ``function`` (one block of straight-line code) into normal form.

    ``layers`` has the layers of the variables that the importer emitted itself. The builder emits nested calls right
    before their outer call, so a variable without a layer belongs to the layer of the next one. ``input_names`` are the
    names for the parameters, in order.
    """
    return _Rewriter(function, layers, input_names).run()


class _Rewriter:
    def __init__(self, function: relax.Function, layers: Mapping[str, str], input_names: Sequence[str]) -> None:
        self.function = function
        self.names = UniqueNames()
        self.builder = relax.BlockBuilder()
        self.parameters = [
            relax.Var(self.names.take(identifier(name)), parameter.ty)
            for name, parameter in zip(input_names, function.params, strict=True)
        ]
        self.values: dict[relax.Var, relax.Expr] = dict(zip(function.params, self.parameters, strict=True))
        self.bindings = [binding for block in function.body.blocks for binding in block.bindings]
        self.layer_of = layers_of_all(self.bindings, layers)
        self.layers: dict[str, str] = {}
        self.layer = ""

    def run(self) -> NormalForm:
        needed = _needed(self.bindings, self.function.body.body)
        with self.builder.function("main", self.parameters):
            with self.builder.dataflow():
                for binding in self.bindings:
                    if binding.var in needed:
                        self.layer = self.layer_of[binding.var]
                        self.values[binding.var] = self._bound(binding)
                fields = [self._substituted(value) for value in self._fields(self.function.body.body)]
                outputs = self._made_by_layers(fields)
            self.builder.emit_func_output(relax.Tuple(outputs))
        # All variables were emitted as outputs of the block. Those that are not become dataflow variables here.
        module = relax.transform.CanonicalizeBindings()(self.builder.get())
        module = relax.transform.DeadCodeElimination()(module)
        kept = {binding.var.name for block in module["main"].body.blocks for binding in block.bindings}
        layers = {name: layer for name, layer in self.layers.items() if name in kept}
        renamed = {
            old.name: new.name for old, new in self.values.items() if isinstance(new, relax.Var) and new.name in kept
        }
        return NormalForm(module, layers, renamed)

    def _bound(self, binding: relax.Binding) -> relax.Expr:
        if isinstance(binding, relax.MatchCast):
            value = self._substituted(binding.value)
            if not tvm_ffi.structural_equal(value.ty, binding.ty):
                raise ModelImportError(
                    f"layer {self.layer!r} has a shape that depends on the values of its input; "
                    "a split network needs shapes that are known beforehand"
                )
            return value
        value = binding.value
        if isinstance(value, relax.If | relax.Function):
            raise ModelImportError(
                f"layer {self.layer!r} chooses what to compute while it runs (if or loop); "
                "only straight-line networks can be split"
            )
        return self._atom(self._substituted(value))

    def _fields(self, result: relax.Expr) -> list[relax.Expr]:
        resolved = self.values.get(result, result) if isinstance(result, relax.Var) else result
        if isinstance(resolved, relax.Tuple):
            return list(resolved.fields)
        if isinstance(resolved.ty, relax.TupleType):
            return [
                self._atom(self.builder.normalize(relax.TupleGetItem(resolved, index)))
                for index in range(len(resolved.ty.fields))
            ]
        return [result]

    def _made_by_layers(self, outputs: Sequence[relax.Expr]) -> list[relax.Expr]:
        """Make each constant output a layer ``output_N``, since some machine must hold it.

        An input that is returned unchanged becomes a layer only if the model has no other layer.
        """
        is_layer = [not (isinstance(output, relax.Var) and self.layers) for output in outputs]
        made = []
        for index, (output, layer) in enumerate(zip(outputs, is_layer, strict=True)):
            self.layer = f"output_{index}"
            made.append(self._atom(relax.op.reshape(output, output.ty.shape)) if layer else output)
        return made

    def _substituted(self, value: relax.Expr) -> relax.Expr:
        """``value`` with the new variables, and its nested calls bound."""
        if isinstance(value, relax.Var):
            return self.values.get(value, value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._atom(self._substituted(field)) for field in value.fields])
        if isinstance(value, relax.TupleGetItem):
            source = self._atom(self._substituted(value.tuple_value))
            return (
                source.fields[value.index]
                if isinstance(source, relax.Tuple)
                else relax.TupleGetItem(source, value.index)
            )
        if isinstance(value, relax.Call):
            arguments = [self._atom(self._substituted(argument)) for argument in value.args]
            return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
        return value

    def _atom(self, value: relax.Expr) -> relax.Expr:
        """Return ``value`` if it needs no binding, else a variable bound to it."""
        if not isinstance(value, relax.Call | relax.TupleGetItem) or _is_null(value):
            return value
        name = self.names.take(identifier(self.layer))
        variable = self.builder.emit_output(value, name)
        self.layers[variable.name] = self.layer
        return variable


def _is_null(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name == "relax.null_value"


def layers_of_all(bindings: Sequence[relax.Binding], layers: Mapping[str, str]) -> dict[relax.Var, str]:
    """Return the layer of every bound variable; one without a layer in ``layers`` gets that of the next variable."""
    found: dict[relax.Var, str] = {}
    layer = "output"
    for binding in reversed(bindings):
        layer = layers.get(binding.var.name, layer)
        found[binding.var] = layer
    return found


def _needed(bindings: Sequence[relax.Binding], result: relax.Expr) -> set[relax.Var]:
    needed = set(relax.analysis.free_vars(result))
    for binding in reversed(bindings):
        if binding.var in needed:
            needed.update(relax.analysis.free_vars(binding.value))
    return needed
