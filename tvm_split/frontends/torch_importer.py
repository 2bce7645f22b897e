"""TVM's importer of exported programs, made to remember layers and to check every operator's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvm_split.errors import ModelImportError, last_line, not_importable
from tvm_split.frontends.recording import RecordingBuilder
from tvm_split.frontends.torch_constants import constant_values
from tvm_split.frontends.torch_graph import user_outputs
from tvm_split.frontends.torch_layers import LayerNames
from tvm_split.frontends.torch_repairs import REFUSED, REPAIRS
from tvm_split.frontends.torch_tensors import to_numpy


@dataclass(frozen=True)
class ImportedGraph:
    """``function`` computes the program's user outputs from its user inputs; weights are constants in it.

    ``layers`` is by the names of the function's variables, and so is ``values``: which variable holds which node.
    """

    function: relax.Function
    layers: dict[str, str]
    values: dict[fx.Node, str]


def import_graph(program: ExportedProgram, names: LayerNames) -> ImportedGraph:
    """Translate a static, decomposed program.

    Raises ModelImportError naming every operator that cannot be imported, with the layers it is in.
    """
    return _Importer(names).translate(program)


class _Importer(ExportedProgramImporter):  # type: ignore[misc]
    def __init__(self, names: LayerNames) -> None:
        super().__init__()
        self.names = names
        self.update_convert_map({name: self._bound_repair(repair) for name, repair in REPAIRS.items()})

    def _bound_repair(self, repair: Callable[[fx.Node, Any], Any]) -> Callable[[fx.Node], Any]:
        return lambda node: repair(node, self)

    def translate(self, program: ExportedProgram) -> ImportedGraph:
        known = constant_values(program)
        self._check_operators([node for node in program.graph.nodes if node not in known])
        builder = RecordingBuilder()
        self.block_builder = builder
        constants = _constants(program)
        parameters = []
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name in constants:
                value = constants[node.name]
                parameter = relax.Var(node.name, relax.TensorType(value.shape, str(value.dtype)))
            else:
                parameter = self._input(node)
            parameters.append(parameter)
            self.env[node] = parameter
        with builder.function("main", parameters):
            with builder.dataflow():
                for node in program.graph.nodes:
                    if node in known:
                        value = to_numpy(known[node])
                        self.env[node] = relax.const(value, str(value.dtype))
                    elif node.op == "call_function":
                        builder.layer = self.names.layer_of(node)
                        self.env[node] = self._converted(node)
                builder.layer = "output"
                outputs = builder.emit_output(relax.Tuple([self._output(value) for value in user_outputs(program)]))
            builder.emit_func_output(outputs)
        bound = {name: tvm.runtime.tensor(value) for name, value in constants.items()}
        module = relax.transform.BindParams("main", bound)(builder.get())
        values = {
            node: value.name
            for node, value in self.env.items()
            if node.op == "call_function"
            and isinstance(value, relax.Var)
            and isinstance(node.meta.get("val"), torch.Tensor)
        }
        return ImportedGraph(module["main"], builder.layers, values)

    def _input(self, node: fx.Node) -> relax.Var:
        value = node.meta["val"]
        return relax.Var(node.name, relax.TensorType([int(size) for size in value.shape], dtype_name(value.dtype)))

    def _output(self, value: Any) -> relax.Expr:
        if not isinstance(value, fx.Node):
            raise ModelImportError(
                f"the model returns {value!r}, which is not a tensor; every output of a split network is one"
            )
        return self.env[value]

    def _check_operators(self, nodes: Sequence[fx.Node]) -> None:
        problems: dict[str, list[str]] = {}
        for node in nodes:
            if node.op == "get_attr":
                problems.setdefault("a sub-graph (cond, while_loop, scan, …)", []).append(self.names.layer_of(node))
            elif node.op == "call_function":
                name = _operator(node)
                reason = REFUSED.get(name)
                if reason is not None:
                    problems.setdefault(f"{name} ({reason})", []).append(self.names.layer_of(node))
                elif name not in self.convert_map:
                    problems.setdefault(name, []).append(self.names.layer_of(node))
        if problems:
            raise not_importable(problems)

    def _converted(self, node: fx.Node) -> Any:
        name = _operator(node)
        layer = self.names.layer_of(node)
        try:
            result = self.convert_map[name](node)
            if isinstance(result, relax.Expr) and not isinstance(result, relax.Tuple | relax.ShapeExpr):
                result = self.block_builder.emit(result)
        except ModelImportError as error:
            raise ModelImportError(f"operator {name} of layer {layer!r} cannot be imported: {error}") from error
        except Exception as error:
            reason = last_line(error)
            raise ModelImportError(f"operator {name} of layer {layer!r} cannot be imported: {reason}") from error
        _check_result(result, node.meta.get("val"), name, layer)
        return result


def _operator(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def dtype_name(dtype: torch.dtype) -> str:
    """numpy's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def _constants(program: ExportedProgram) -> dict[str, np.ndarray[Any, Any]]:
    """Placeholder name to value, for every parameter, buffer and lifted constant that the graph takes."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in program.state_dict:
            value = program.state_dict[spec.target]
        elif spec.target in program.constants:
            value = program.constants[spec.target]
        else:
            raise ModelImportError(f"the model takes {spec.target!r} ({spec.kind.name}), which is not a tensor")
        found[spec.arg.name] = to_numpy(value)
    return found


def _check_result(result: Any, expected: Any, name: str, layer: str) -> None:
    """Raise if the importer's types are not those that torch computed for the same node."""
    if isinstance(expected, list | tuple):
        fields = list(result.fields) if isinstance(result, relax.Tuple) else result
        for index, part in enumerate(expected):
            if isinstance(fields, list | tuple):
                if index < len(fields):
                    _check_result(fields[index], part, name, layer)
            elif isinstance(result.ty, relax.TupleType) and index < len(result.ty.fields):
                _check_type(result.ty.fields[index], part, name, layer)
    elif isinstance(expected, torch.Tensor) and isinstance(result, relax.Expr):
        _check_type(result.ty, expected, name, layer)


def _check_type(found: relax.Type, expected: Any, name: str, layer: str) -> None:
    if not isinstance(expected, torch.Tensor):
        return
    right = f"{dtype_name(expected.dtype)}{list(expected.shape)}"
    shape = getattr(found, "shape", None)
    try:
        sizes = [int(size) for size in shape] if shape is not None else None
    except TypeError:
        sizes = None
    wrong = f"{getattr(found, 'dtype', found)}{sizes}"
    if not isinstance(found, relax.TensorType) or sizes != list(expected.shape) or wrong != right:
        raise ModelImportError(f"operator {name} of layer {layer!r} gives {right} in torch, imported it gives {wrong}")
