"""Lower an exported program to a static, functional graph of ATen operators that have conversions.

Torch's own decomposition traces the whole network again, although most calls stay as they are. Here only the calls that
need it are decomposed, each distinct call once, all of them in one small program. Torch decomposes the whole network
if it has control flow, or if memory that has several names is written.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._export.utils import _special_op_to_preserve_cia
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export._trace import _ignore_backend_decomps
from torch.export.exported_program import (
    _decompose_exported_program,
    _override_composite_implicit_decomp,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.fx.traceback import NodeSource
from torch.utils import _pytree as pytree

from tvm_split.errors import ModelImportError, class_and_first_line
from tvm_split.frontends.torch.conversions.layers import RESAMPLINGS
from tvm_split.frontends.torch.graph import Lowered, has_open_sizes, user_inputs

aten = torch.ops.aten

KEPT_OPERATORS = (
    # torch would decompose these into many reshapes and copies; in Relax each is one or two operators.
    aten.linear.default,
    aten.matmul.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.scaled_dot_product_attention.default,
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.avg_pool1d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.silu.default,
    aten.hardswish.default,
    aten.special_ndtr.default,
    aten.std.correction,
    aten.unfold.default,
    *(getattr(aten, name).vec for name in RESAMPLINGS),
)

TAKEN_APART = (
    # Batch norms in training mode: torch's single operator reads statistics that it only updates.
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    # TVM's importer converts these wrongly, and torch has decompositions for them.
    aten.addmm.default,
    aten.addmv.default,
    aten.isinf.default,
    aten.linalg_vector_norm.default,
)

Decompositions = dict[Any, Callable[..., Any]]
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _NotByCallError(Exception):
    """The calls of a program cannot be lowered one by one."""


def lower(program: ExportedProgram, sizes: Mapping[str, int]) -> Lowered:
    """Lower ``program`` to core ATen operators and operators that Relax has, without in-place ones.

    The result is static: ``sizes`` has the size of each symbol. Raises ModelImportError.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = _Functional(program, sizes).graph
            _decompose_calls(graph)
        except Exception:
            # Torch's own way is slower. It lowers everything that can be lowered, and its error says what is wrong.
            return _lowered_by_torch(program, sizes)
    graph.eliminate_dead_code()
    return Lowered(graph, program.graph_signature, program.state_dict, program.constants)


class _Functional:
    """The ``graph`` of a program with static sizes, and with functional operators instead of in-place ones.

    The calls are run on fake tensors, which share memory as the real ones do. Raises an error for control flow, for
    sizes that stay open, and where a write may be seen through another tensor.
    """

    def __init__(self, program: ExportedProgram, sizes: Mapping[str, int]) -> None:
        self.graph = fx.Graph()
        self._values: dict[fx.Node, Any] = {}
        """The new node of each old one, or the value of a call that returns no tensor."""
        self._holders: dict[int, list[fx.Node]] = {}
        """The old nodes whose values are in a memory, by its address."""
        nodes = list(program.graph.nodes)
        self._last_use = {source: place for place, node in enumerate(nodes) for source in node.all_input_nodes}
        self._written: set[int] = set()
        """The memories into which in-place operators would have written."""
        self._views: list[fx.Node] = []
        mode = _mode_of(nodes)
        # Sizes that depend on values raise an error here, and are traced again.
        fresh = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext()
        with mode, fresh, _fixed(program, sizes) if sizes else nullcontext():
            for place, node in enumerate(nodes):
                if node.op in ("placeholder", "output"):
                    self._hold(node, self.graph.node_copy(node, self._values.__getitem__))
                    self._values[node].name = node.name  # the copy of ``input`` is ``input_1``
                else:
                    self._call(node, place)
        self._move_views()

    def _move_views(self) -> None:
        """Let views of written memory be of the layer that reads them first: torch makes them anew at each use."""
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        readers: dict[fx.Node, fx.Node] = {}
        for view in reversed(self._views):
            reader = min((readers.get(user, user) for user in view.users), key=order.__getitem__, default=view)
            readers[view] = reader
            if reader.op == "call_function":
                view.meta = {**reader.meta, "val": _fake(view)}

    def _hold(self, node: fx.Node, value: fx.Node) -> None:
        self._values[node] = value
        for memory in _memories(value):
            self._holders.setdefault(memory, []).append(node)

    def _call(self, node: fx.Node, place: int) -> None:
        target: Any = node.target
        is_operator = isinstance(target, OpOverload)
        if not is_operator and getattr(target, "__module__", "") not in ("_operator", "math"):
            raise _NotByCallError
        is_in_place = is_operator and target._schema.is_mutable
        target = _functional_variant(target) if is_in_place else target
        arguments, keywords = fx.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
        result = target(*fx.map_arg(arguments, _fake), **fx.map_arg(keywords, _fake))
        leaves = pytree.tree_leaves(result)
        if has_open_sizes(result) or any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves):
            raise _NotByCallError
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._values[node] = result
            return
        new = self.graph.create_node("call_function", target, arguments, keywords, node.name)
        # A result of an operator with several ones is of the operator's layer.
        layer = arguments[0].meta if target is getitem else {**node.meta, "from_node": [NodeSource(node)]}
        new.meta = {**layer, "val": result}
        if is_in_place:
            self._replace(arguments[0], new, place)
        elif not self._written.isdisjoint(_memories(new)):
            self._views.append(new)
        self._hold(node, new)

    def _replace(self, written: fx.Node, new: fx.Node, place: int) -> None:
        """Let ``new`` be the value of all nodes that hold ``written``, into which the call at ``place`` writes."""
        (memory,) = _memories(written)
        holders = self._holders.pop(memory)
        for holder in holders:
            is_read_later = self._last_use.get(holder, -1) > place
            if holder.op == "placeholder" or (is_read_later and _view(self._values[holder]) != _view(written)):
                raise _NotByCallError
        if _view(new)[:2] != _view(written)[:2]:
            raise _NotByCallError
        self._written.update(_memories(new) - {memory})
        for holder in holders:
            self._hold(holder, new)


def _mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode:
    """Return the mode of the nodes' fake tensors."""
    return detect_fake_mode([_fake(node) for node in nodes if "val" in node.meta]) or FakeTensorMode()


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]


def _memories(node: fx.Node) -> set[int]:
    """Return the addresses of the memory that a node's tensors are in."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _view(node: fx.Node) -> tuple[Any, ...]:
    value = _fake(node)
    if not isinstance(value, torch.Tensor):
        raise _NotByCallError
    return tuple(value.shape), value.dtype, value.stride(), value.storage_offset(), value.requires_grad, value.device


def _functional_variant(target: OpOverload) -> OpOverload:
    """Return the operator that computes what an in-place operator writes into its first argument."""
    written, *others = target._schema.arguments
    namespace, _, name = target._schema.name.partition("::")
    writes_one = _is_written(written) and not any(map(_is_written, others))
    changes_shape = torch.Tag.inplace_view in target.tags and target is not aten.detach_.default
    if namespace != "aten" or not name.endswith("_") or not writes_one or changes_shape:
        raise _NotByCallError
    variant = getattr(getattr(aten, name[:-1]), target._overloadname)
    if [argument.name for argument in variant._schema.arguments] != [written.name, *(other.name for other in others)]:
        raise _NotByCallError
    return variant


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _decompose_calls(graph: fx.Graph) -> None:
    """Replace the calls that have no conversion by those into which torch decomposes them."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _is_composed(node):
            # Torch's decompositions depend on this.
            calls.setdefault(repr((node.target, fx.map_arg((node.args, dict(node.kwargs)), _view))), []).append(node)
    if calls:
        for nodes, part in zip(calls.values(), _parts([nodes[0] for nodes in calls.values()]), strict=True):
            for node in nodes:
                _inline(graph, node, *part)


def _is_composed(node: fx.Node) -> bool:
    target: Any = node.target
    composites, others = _decompositions()
    if target is aten.batch_norm.default and node.args[3] is not None and node.args[5] is False:
        return False
    if target in composites:
        return composites[target] is not _special_op_to_preserve_cia
    is_composite = isinstance(target, OpOverload) and target.has_kernel_for_dispatch_key(_COMPOSITE)
    return target in others or is_composite


def _sources(call: fx.Node) -> list[fx.Node]:
    """Return the arguments of a call that are nodes, each as often as it is one."""
    sources: list[fx.Node] = []
    fx.map_arg((call.args, dict(call.kwargs)), sources.append)
    return sources


def _parts(calls: list[fx.Node]) -> Iterator[tuple[list[fx.Node], list[fx.Node], list[Any]]]:
    """Yield for each call the parameters, calls and results of the graph into which torch decomposes it."""
    counts = [len(_fake(call)) if isinstance(_fake(call), list | tuple) else 0 for call in calls]
    traced = _traced(calls, counts)
    parameters = iter(traced.find_nodes(op="placeholder"))
    outputs = iter(traced.output_node().args[0])
    results = [[next(outputs) for _ in range(count or 1)] for count in counts]
    calls_of: dict[Any, set[int]] = {}
    for place, of_call in enumerate(results):
        for result in of_call:
            calls_of.setdefault(result, set()).add(place)
    bodies: list[list[fx.Node]] = [[] for _ in calls]
    for node in reversed(traced.nodes):
        for place in calls_of.get(node, ()) if node.op == "call_function" else ():
            bodies[place].append(node)
            for source in node.all_input_nodes:
                calls_of.setdefault(source, set()).add(place)
    for call, body, of_call in zip(calls, bodies, results, strict=True):
        yield [next(parameters) for _ in _sources(call)], body[::-1], of_call


def _traced(calls: list[fx.Node], counts: list[int]) -> fx.Graph:
    """Return torch's decomposition of a program of these calls on parameters; ``counts`` are those of their fields."""
    sources = [source for call in calls for source in _sources(call)]
    small = fx.Graph()
    parameters = iter([small.placeholder(f"argument_{place}") for place in range(len(sources))])
    results = []
    for call, count in zip(calls, counts, strict=True):
        result = small.node_copy(call, lambda _: next(parameters))
        results += [small.call_function(getitem, (result, place)) for place in range(count)] or [result]
    small.output(tuple(results))
    composites, others = _decompositions()
    with _mode_of(calls), _ignore_backend_decomps(), _override_composite_implicit_decomp(composites):
        module = fx.GraphModule({}, small)
        traced, signature = aot_export_module(module, [*map(_fake, sources)], trace_joint=False, decompositions=others)
    if signature.user_inputs_to_mutate or signature.buffers_to_mutate or traced.graph.find_nodes(op="get_attr"):
        raise _NotByCallError
    return traced.graph


def _inline(graph: fx.Graph, call: fx.Node, parameters: list[fx.Node], body: list[fx.Node], results: list[Any]) -> None:
    """Replace a call by copies of ``body``; they are of the same layer."""
    copies: dict[Any, fx.Node] = dict(zip(parameters, _sources(call), strict=True))
    with graph.inserting_before(call):
        for node in body:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**call.meta, "val": _fake(node)}
    if isinstance(_fake(call), torch.Tensor):
        call.replace_all_uses_with(copies[results[0]])
    for field in list(call.users):
        if field.target is not getitem:
            raise _NotByCallError
        field.replace_all_uses_with(copies[results[field.args[1]]])
        graph.erase_node(field)
    graph.erase_node(call)


@cache
def _decompositions() -> tuple[Decompositions, Decompositions]:
    """Return the decompositions of composite operators (defined only by others), and those of all other operators.

    Composite operators that torch would decompose in the same way are left out."""
    table = torch.export.default_decompositions()
    table.update(get_decompositions(TAKEN_APART))
    for overload in KEPT_OPERATORS:
        table.pop(overload, None)
    core = _core_aten_decompositions_post_autograd()
    taken_apart_anyway = {composite for composite in table if composite not in core}
    composites, rest = _split_decomp_table_to_cia_and_python_decomp(dict(table))
    return {op: change for op, change in composites.items() if op not in taken_apart_anyway}, rest


def _dropout(values: Any, probability: float, is_training: bool) -> Any:
    """Return ``values`` themselves in evaluation mode, as torch does; its decomposition returns a copy."""
    training = is_training and probability > 0
    return aten.native_dropout.default(values, probability, True)[0] if training else values


def _lowered_by_torch(program: ExportedProgram, sizes: Mapping[str, int]) -> Lowered:
    composites, decompositions = _decompositions()
    try:
        with _fixed(program, sizes) if sizes else nullcontext():
            # `run_decompositions` does the same, but first registers the default decomposition of each of torch's
            # hundreds of composite operators, which takes most of an import's time.
            whole = _decompose_exported_program(
                program,
                cia_to_decomp={**composites, aten.dropout.default: _dropout},
                python_decomp_table=decompositions,
                joint_loss_index=None,
                decompose_custom_triton_ops=False,
            )
    except Exception as error:
        raise ModelImportError(f"torch cannot decompose the exported program: {class_and_first_line(error)}") from error
    whole.graph.eliminate_dead_code()
    return Lowered(whole.graph, whole.graph_signature, whole.state_dict, whole.constants)


@contextmanager
def _fixed(program: ExportedProgram, sizes: Mapping[str, int]) -> Iterator[None]:
    """Give the inputs of ``program`` these ``sizes`` by symbol inside the block; tracing infers all other sizes."""
    before = {node: node.meta["val"] for node in user_inputs(program)}

    def static(numbers: Iterable[Any]) -> list[int]:
        expressions = [number if isinstance(number, int) else number.node.expr for number in numbers]
        return [
            value
            if isinstance(value, int)
            else int(value.subs({symbol: sizes[str(symbol)] for symbol in value.free_symbols}))
            for value in expressions
        ]

    try:
        for node, value in before.items():
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(static(value.shape), static(value.stride()), dtype=value.dtype)
        yield
    finally:
        for node, value in before.items():
            node.meta["val"] = value
