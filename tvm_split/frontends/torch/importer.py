"""Import exported programs with TVM's importer, extended by own conversions."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends.building import Built
from tvm_split.frontends.convert import (
    BRANCH,
    DYNAMIC,
    LOOP,
    RANDOM,
    Graph,
    Importer,
    Kind,
    Operation,
    convert,
    is_users,
)
from tvm_split.frontends.torch.conversions import TorchCall, arithmetic, indexing, layers
from tvm_split.frontends.torch.graph import (
    LayerNames,
    arrays_of,
    constant_values,
    held_tensors,
    user_inputs,
    user_outputs,
)
from tvm_split.frontends.torch.tensors import IMPORTABLE, dtype_name, remedy_for

_RANDOM = (
    "randn.default", "randn_like.default", "rand.default", "rand_like.default", "randint.low", "randint_like.default",
    "randperm.default", "bernoulli.p", "bernoulli.default", "exponential.default", "normal.Tensor_float",
    "multinomial.default", "native_dropout.default", "dropout.default",
)  # fmt: skip
"""Random operators, which TVM's importer computes once or omits without a warning."""


CONVERSIONS = {**arithmetic.CONVERSIONS, **layers.CONVERSIONS, **indexing.CONVERSIONS}
REFUSED = {
    **dict.fromkeys(_RANDOM, RANDOM),
    **dict.fromkeys(("masked_select.default", "nonzero.default", "unique_dim.default", "_unique2.default"), DYNAMIC),
    "cond": BRANCH,
    "while_loop": LOOP,
}
"""Operators that are refused, each with the reason."""


def import_graph(program: ExportedProgram, names: LayerNames) -> Built:
    """Convert a static, decomposed program; its values are the fx nodes. Raises ModelImportError."""
    tensors = held_tensors(program) | constant_values(program)
    for output in user_outputs(program):
        if not isinstance(output, fx.Node):
            raise ModelImportError(
                f"the model returns {output!r}, which is not a tensor; every output of a split network is one"
            )
    inputs = {node: _spec(node) for node in user_inputs(program)}
    constants = arrays_of(program, tensors, names)
    operations = [
        _operation(node, names)
        for node in program.graph.nodes
        if node.op == "get_attr" or (node.op == "call_function" and node not in tensors)
    ]
    return convert(Graph(inputs, user_outputs(program), constants, operations), _Importer())


def _operation(node: fx.Node, names: LayerNames) -> Operation:
    layer = names.layer_of(node)
    if node.op == "get_attr":
        return Operation("a sub-graph (cond, while_loop, scan, …)", layer, (), (node,), [None])
    kind = str(getattr(node.target, "__name__", node.target))
    schema: Any = getattr(node.target, "_schema", None)
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments if schema else ()):
        is_placed = position < len(node.args) and not argument.kwarg_only
        arguments[argument.name] = (
            node.args[position] if is_placed else node.kwargs.get(argument.name, argument.default_value)
        )
    value = node.meta.get("val")
    is_refused = isinstance(value, torch.Tensor) and value.dtype not in IMPORTABLE
    refusal = f"it computes {dtype_name(value.dtype)}; {remedy_for(value.dtype)}" if is_refused else ""
    return Operation(
        kind, layer, tuple(node.all_input_nodes), (node,), [_kind(value)], arguments, node, refusal, _line(node)
    )


def _line(node: fx.Node) -> str:
    """The innermost line of a module's forward that made a node, as ``FILE, line N``; "" if it is unknown."""
    lines = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{path}, line {number}" for path, number in lines if is_users(path)]
    return own[-1] if own else ""


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_kind(part) for part in value)
    if not isinstance(value, torch.Tensor):
        return None
    is_static = all(isinstance(size, int) for size in value.shape)
    return Kind(dtype_name(value.dtype), tuple(value.shape) if is_static else None)


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(node.name, tuple(int(size) for size in value.shape), dtype_name(value.dtype))


class _Importer(Importer):
    def __init__(self) -> None:
        super().__init__("torch", CONVERSIONS, REFUSED)
        self.tvm = ExportedProgramImporter()
        self.tvm.block_builder, self.tvm.env = self.builder, self.values

    def call(self, operation: Operation) -> TorchCall:
        arguments = {name: self.tvm._retrieve_args(value) for name, value in operation.attributes.items()}
        return TorchCall(operation, list(arguments.values()), arguments, self)

    def is_known_to_tvm(self, operation: Operation) -> bool:
        return operation.kind in self.tvm.convert_map

    def by_tvm(self, call: TorchCall) -> Any:
        return self.tvm.convert_map[call.operation.kind](call.source)
