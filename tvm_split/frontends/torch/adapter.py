"""Import exported programs with TVM's importer, extended to record layers and to check every operator's result."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from relay_passes.ir import constant
from tvm_split.errors import ModelImportError
from tvm_split.frontends.importing import (
    BRANCH,
    DYNAMIC,
    LOOP,
    RANDOM,
    Imported,
    RecordingBuilder,
    check_type,
    named,
    refuse,
)
from tvm_split.frontends.operators import Operators
from tvm_split.frontends.torch.calls import Call, Repair
from tvm_split.frontends.torch.constants import constant_values
from tvm_split.frontends.torch.conversions import arithmetic, indexing, layers, reductions, resampling
from tvm_split.frontends.torch.graph import LayerNames, held_tensors, user_inputs, user_outputs
from tvm_split.frontends.torch.tensors import dtype_name, to_numpy

REPAIRS: dict[str, Repair] = {
    **arithmetic.REPAIRS,
    **layers.REPAIRS,
    **indexing.REPAIRS,
    **reductions.REPAIRS,
    **resampling.REPAIRS,
}
"""Conversions that replace TVM's, which were wrong, missing or failing in TVM 0.27; comments at each say how.

``tests/tvm_split/frontends/test_torch_sweep.py`` compares each with torch.
"""

_RANDOM = (
    "randn.default", "randn_like.default", "rand.default", "rand_like.default", "randint.low", "randint_like.default",
    "randperm.default", "bernoulli.p", "bernoulli.default", "exponential.default", "normal.Tensor_float",
    "multinomial.default", "native_dropout.default", "dropout.default",
)  # fmt: skip
"""Random operators, which TVM's importer computes once or omits without a warning."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(_RANDOM, RANDOM),
    **dict.fromkeys(("masked_select.default", "nonzero.default", "unique_dim.default", "_unique2.default"), DYNAMIC),
    "cond": BRANCH,
    "while_loop": LOOP,
}
"""Operators that are refused, each with the reason."""


def import_graph(program: ExportedProgram, names: LayerNames) -> Imported:
    """Translate a static, decomposed program; ``held`` of the result has the fx nodes that return one tensor.

    Raises ModelImportError, which names every operator that cannot be imported and its layers.
    """
    return _Importer(names).translate(program)


class _Importer(ExportedProgramImporter):  # type: ignore[misc]
    def __init__(self, names: LayerNames) -> None:
        super().__init__()
        self.names = names
        self.block_builder = RecordingBuilder()

    def translate(self, program: ExportedProgram) -> Imported:
        builder = self.block_builder
        known = held_tensors(program) | constant_values(program)
        refuse(self._problems(program.graph, known))
        inputs = user_inputs(program)
        for node in inputs:
            value = node.meta["val"]
            kind = relax.TensorType([int(size) for size in value.shape], dtype_name(value.dtype))
            self.env[node] = relax.Var(node.name, kind)
        with builder.function("main", [self.env[node] for node in inputs]):
            with builder.dataflow():
                for node in program.graph.nodes:
                    if node in known:
                        value = to_numpy(known[node])
                        self.env[node] = constant(value)
                    elif node.op == "call_function":
                        builder.layer = self.names.layer_of(node)
                        self.env[node] = self._converted(node)
                builder.layer = "output"
                outputs = builder.emit_output(relax.Tuple([self._output(value) for value in user_outputs(program)]))
            builder.emit_func_output(outputs)
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        return builder.imported(
            {node: self.env[node] for node in calls if isinstance(node.meta.get("val"), torch.Tensor)}
        )

    def _output(self, value: Any) -> relax.Expr:
        if not isinstance(value, fx.Node):
            raise ModelImportError(
                f"the model returns {value!r}, which is not a tensor; every output of a split network is one"
            )
        return self.env[value]

    def _problems(self, graph: fx.Graph, known: Container[fx.Node]) -> Iterator[tuple[str, str]]:
        for node in graph.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if node.op == "get_attr":
                yield "a sub-graph (cond, while_loop, scan, …)", self.names.layer_of(node)
            elif node.op == "call_function" and node not in known:
                if name in REFUSED:
                    yield f"{name} ({REFUSED[name]})", self.names.layer_of(node)
                elif name not in REPAIRS and name not in self.convert_map:
                    yield name, self.names.layer_of(node)

    def _converted(self, node: fx.Node) -> Any:
        call = Call(node, self)
        operator = f"operator {call.name} of layer {self.names.layer_of(node)!r}"
        with named(operator):
            if call.name in REPAIRS:
                result = REPAIRS[call.name](call, Operators(self.block_builder))
            else:
                result = self.convert_map[call.name](node)
            if isinstance(result, relax.Expr) and not isinstance(result, relax.Tuple | relax.ShapeExpr):
                result = self.block_builder.emit(result)
        _check_result(result, node.meta.get("val"), operator)
        return result


def _check_result(result: Any, expected: Any, operator: str) -> None:
    """Raise ModelImportError if the imported types differ from those that torch computed for the same node."""
    if isinstance(expected, torch.Tensor):
        found = [result.ty] if isinstance(result, relax.Expr) else []
        expected = [expected]
    elif isinstance(result, relax.Expr):
        found = list(result.ty.fields) if isinstance(result.ty, relax.TupleType) else []
    else:
        found = [each.ty for each in result] if isinstance(result, list | tuple) else []
    for kind, right in zip(found, expected if isinstance(expected, list | tuple) else [], strict=False):
        if isinstance(right, torch.Tensor):
            check_type(kind, dtype_name(right.dtype), [int(size) for size in right.shape], operator, "torch")
