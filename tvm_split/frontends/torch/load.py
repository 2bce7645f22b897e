"""Load torch modules with example inputs, exported programs and ``.pt2`` files as Models.

TVM's importer converts the operators that have no conversion here.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from rpc_runtime.program.specs import TensorSpec
from tvm_split.errors import ModelImportError, NoExamplesError, UntriedVersionWarning, class_and_first_line
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.building import QUANTIZED_TOLERANCE, Built
from tvm_split.frontends.channels_first import channels_first
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
from tvm_split.frontends.dimensions import Derived, as_arguments, bound_sizes, checked_examples, with_rows
from tvm_split.frontends.names import output_names, paths_in
from tvm_split.frontends.torch.conversions import TorchCall, arithmetic, indexing, layers, quantised
from tvm_split.frontends.torch.export import Arguments, Called, TorchReference, export
from tvm_split.frontends.torch.graph import (
    LayerNames,
    Lowered,
    arrays_of,
    check_no_state,
    constant_values,
    has_open_sizes,
    held_tensors,
    user_inputs,
    user_outputs,
)
from tvm_split.frontends.torch.lowering import lower
from tvm_split.frontends.torch.tensors import IMPORTABLE, dtype_name, remedy_for, require_importable, to_numpy, to_torch
from tvm_split.model import Model


def load_torch(
    source: nn.Module | Callable[..., Any] | ExportedProgram | str | Path,
    request: ImportRequest,
    has_channels_last: bool = False,
) -> Model:
    """Return a Model of a torch module or function (with example inputs), an exported program, or a ``.pt2`` file.

    ``example_inputs`` is a tuple of positional arguments, a dict of keyword arguments, or one tensor. Arguments may
    be nested in dicts, lists and tuples; ``Model.inputs`` and ``Model.outputs`` are flat, in torch's pytree order.
    ``has_channels_last``: the network transposes around its convolutions; these transpositions are removed.
    Raises ModelImportError.
    """
    name = request.name
    if isinstance(source, str | Path):
        name = name or Path(source).stem
        source = _read(Path(source))
    arguments = None if request.example_inputs is None else _as_tensors(as_arguments(request.example_inputs))
    if isinstance(source, ExportedProgram):
        return _model(source, source.module(), arguments, replace(request, name=name or "model"), has_channels_last)
    source = getattr(source, "_orig_mod", source)  # of a module that torch.compile wrapped
    name = name or getattr(source, "__qualname__", type(source).__name__).rpartition(">.")[2]
    if arguments is None:
        raise NoExamplesError(f"{name} is a torch module")
    arguments = _with_batch(arguments, request.batch) if request.batch is not None else arguments
    if request.dimensions:
        raise ModelImportError(
            "dimensions are for exported programs and ONNX files; the sizes of a torch module are those of its "
            f"example_inputs, so give inputs of the wanted sizes instead of dimensions={dict(request.dimensions)}"
        )
    module = source if isinstance(source, nn.Module) else Called(source)
    program = export(module, arguments, name)
    return _model(program, module, arguments, replace(request, name=name), has_channels_last)


def _model(
    program: ExportedProgram,
    run: nn.Module,
    arguments: Arguments | None,
    request: ImportRequest,
    has_channels_last: bool,
) -> Model:
    for node in user_inputs(program):
        require_importable(node.meta["val"].dtype, f"input {node.name!r}")
    sizes, examples = _bound_sizes(program, arguments, request)
    if examples is None and program.example_inputs is not None:
        leaves = pytree.tree_leaves(program.example_inputs)
        examples = [to_numpy(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    lowered = lower(program, sizes)
    names = LayerNames(lowered, run.only_part if isinstance(run, Called) else "")
    check_no_state(lowered, names)
    built = import_graph(lowered, names)
    modules = dict.fromkeys((names.shortened(path) for path, _ in run.named_modules() if path), "")
    built = replace(built, empty_layers={**modules, **built.empty_layers})
    if has_channels_last:
        built = channels_first(built)
    reference = TorchReference(run, _structure(program), lowered, built.held)
    fits = examples is not None and [array.shape for array in examples] == [spec.shape for spec in built.inputs]
    is_quantised = any(getattr(node.target, "namespace", "") == "quantized_decomposed" for node in lowered.graph.nodes)
    return built.model(
        request.name or "model",
        "torch",
        reference,
        examples if fits else None,
        outputs=_output_names(program),
        tolerance=QUANTIZED_TOLERANCE if is_quantised else None,
    )


def _output_names(program: ExportedProgram) -> list[str]:
    """Return the outputs' names by their paths in the source's result: keys of dicts, fields of dataclasses."""
    structure = program.call_spec.out_spec
    places = list(range(structure.num_leaves))
    leaves = paths_in(pytree.tree_unflatten(places, structure))
    path_of = {leaf: path for leaf, path in leaves if isinstance(leaf, int)}  # others are nodes of unknown classes
    return output_names([path_of.get(place, ()) for place in places])


def _as_tensors(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: to_torch(leaf) if hasattr(leaf, "__array_interface__") else leaf, value)


def _structure(program: ExportedProgram) -> Callable[[Sequence[torch.Tensor]], Arguments]:
    """Return a function from flat tensors to the arguments of the program's source; other leaves are constant."""
    spec = program.call_spec.in_spec
    leaves = [entry.arg for entry in program.graph_signature.input_specs if entry.kind is InputKind.USER_INPUT]

    def arguments_of(tensors: Sequence[torch.Tensor]) -> Arguments:
        waiting = iter(tensors)
        values = [leaf.value if isinstance(leaf, ConstantArgument) else next(waiting) for leaf in leaves]
        positional, keyword = pytree.tree_unflatten(values, spec)
        return tuple(positional), dict(keyword)

    return arguments_of


def _read(path: Path) -> ExportedProgram:
    try:
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # torch knows these operators only then
        return torch.export.load(str(path))
    except Exception as error:
        raise ModelImportError(
            f"{str(path)!r} cannot be read as a program saved by torch.export.save: {class_and_first_line(error)}"
        ) from error


def _with_batch(arguments: Arguments, batch: int | None) -> Any:
    """Return ``arguments`` with ``batch`` rows in every tensor, made by repeating rows. Raises ModelImportError."""
    leaves, structure = pytree.tree_flatten(arguments)
    arrays = with_rows([to_numpy(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)], batch)
    rows = iter(arrays)
    return pytree.tree_unflatten(
        [to_torch(next(rows)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
    )


def _bound_sizes(
    program: ExportedProgram, arguments: Arguments | None, request: ImportRequest
) -> tuple[dict[str, int], list[Any] | None]:
    """Return the size of every symbol in the program's inputs, and the example inputs (None without ``arguments``).

    A symbol is named by torch's name (``s77``) or by its place: ``x[1]`` is axis 1 of input ``x``. Raises
    ModelImportError if a symbol stays open, two sources disagree, or torch's own bounds are violated.
    """
    specs = []
    for node in user_inputs(program):
        value = node.meta["val"]
        specs.append((node.name, [_open_size(size) for size in value.shape], dtype_name(value.dtype)))
    examples = None
    if arguments is not None:
        leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        examples = checked_examples(specs, [to_numpy(leaf) for leaf in leaves])
    sizes = bound_sizes(specs, request, examples, symbols_are_names=False)
    for symbol, bounds in program.range_constraints.items():
        bound = sizes.get(str(symbol))
        if bound is not None and not bounds.lower <= bound.size <= bounds.upper:
            raise ModelImportError(
                f"{bound.reason}, so {symbol} is {bound.size}: the program was exported for {bounds.lower} to "
                f"{bounds.upper}"
            )
    return {symbol: bound.size for symbol, bound in sizes.items()}, examples


def _open_size(size: int | torch.SymInt) -> int | str | Derived | None:
    """Return a fixed size, the symbol of an open one, or how it follows from one; None if it follows otherwise."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Symbol:
        return str(expression)
    for symbol in expression.free_symbols:
        offset = expression.subs(symbol, 0)
        factor = expression.subs(symbol, 1) - offset
        if expression == factor * symbol + offset and factor.is_Integer:
            return Derived(str(symbol), int(factor), int(offset))
    return None


CONVERSIONS = {**arithmetic.CONVERSIONS, **layers.CONVERSIONS, **indexing.CONVERSIONS, **quantised.CONVERSIONS}
REFUSED = {"cond": BRANCH, "while_loop": LOOP}
"""Operators that are refused by their names, each with the reason."""


def import_graph(program: Lowered, names: LayerNames) -> Built:
    """Convert a lowered program; keys of ``held`` in the result are fx nodes. Raises ModelImportError."""
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
    results, refusal = [_kind(node.meta.get("val"))], _refusal(node, kind)
    return Operation(kind, layer, tuple(node.all_input_nodes), (node,), results, arguments, node, refusal, _line(node))


def _refusal(node: fx.Node, kind: str) -> str:
    """Return the reason why a call cannot be imported, or an empty string."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype not in IMPORTABLE:
        return f"it computes {dtype_name(value.dtype)}; {remedy_for(value.dtype)}"
    if kind in CONVERSIONS:
        return ""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return RANDOM  # TVM's importer would compute it once, or omit it
    has_open_source = any(has_open_sizes(source.meta.get("val")) for source in node.all_input_nodes)
    return DYNAMIC if has_open_sizes(value) and not has_open_source else ""


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
    return Kind(dtype_name(value.dtype), None if has_open_sizes(value) else tuple(value.shape))


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


def _warn_if_untested() -> None:
    """Warn if torch's version is outside the range that the extra ``torch`` of this project requires."""
    try:
        texts = metadata.requires("tvm-split") or []
    except metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        return
    for requirement in map(Requirement, texts):
        marker, tested = requirement.marker, requirement.specifier
        is_of_extra = requirement.name == "torch" and marker is not None and marker.evaluate({"extra": "torch"})
        if is_of_extra and not tested.contains(str(torch.__version__), prereleases=True):
            text = (
                f"torch {torch.__version__} is installed, and tvm-split is tested with torch{tested}. "
                f"If an import or its answers are wrong: pip install 'torch{tested}'"
            )
            warnings.warn(UntriedVersionWarning(text), stacklevel=2)


_warn_if_untested()  # at import, so that it warns once
