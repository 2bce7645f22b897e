"""Read and rewrite the function ``main`` of a Relax module, which the passes of this package take and return.

This package may not import the packages above it, so its errors have their own bases. They are registered with TVM, so
that they keep their class when they pass through its pass manager. For the same reason they carry only a message.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm_ffi import register_error

from relay_passes.one_at_a_time import ONE_AT_A_TIME

Replace = Callable[[str, relax.Expr, relax.BlockBuilder], relax.Expr | None]
"""Maps a variable's name and expression to its replacement; None to bind it unchanged.

The expression already contains earlier replacements. The builder may emit further bindings.
"""

PLAIN_LAYOUTS = {f"relax.nn.conv{len(axes)}d": (f"NC{axes}", f"OI{axes}") for axes in ("W", "HW", "DHW")}
"""Convolution → the layouts of its data and weights in the form that importers write."""


@register_error
class ContractError(Exception):
    """A module does not have the form that a pass requires, or a pass did not produce the form that it ensures."""


@register_error
class SelfWaitError(ValueError):
    """A stage needs a tensor of a later stage, so it would wait for its own result."""


def main_function(module: tvm.IRModule) -> relax.Function:
    """Return the function ``main`` of a module; raise `ContractError` if there is none."""
    if "main" not in {variable.name_hint for variable in module.get_global_vars()}:
        raise ContractError("the module has no function 'main'")
    return module["main"]


def bindings_of(function: relax.Function) -> Iterator[relax.VarBinding]:
    """Yield all bindings of a function's blocks, in order; raise `ContractError` if the function is not normalised."""
    if not isinstance(function.body, relax.SeqExpr):
        raise ContractError("the function's body is not normalised to a sequence of bindings")
    for block in function.body.blocks:
        for binding in block.bindings:
            if not isinstance(binding, relax.VarBinding):
                raise ContractError(f"the binding of {binding.var.name!r} is a {type(binding).__name__}")
            yield binding


def names_of(function: relax.Function) -> list[str]:
    """Return the names of a function's parameters and of its bound variables."""
    return [variable.name for variable in (*function.params, *(binding.var for binding in bindings_of(function)))]


def free_name(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is taken, and add it to ``taken``: passes look variables up by name."""
    free = next(free for free in chain([name], (f"{name}_{number}" for number in count(2))) if free not in taken)
    taken.add(free)
    return free


def operations_of(function: relax.Function) -> list[relax.VarBinding]:
    """Return all bindings of a function except that of the returned tuple."""
    return [binding for binding in bindings_of(function) if not binding.var.same_as(function.body.body)]


def dependent_names(function: relax.Function) -> set[str]:
    """Return the names of the parameters and of all variables that depend on one; others (tables, masks) are fixed."""
    dependent = {parameter.name for parameter in function.params}
    for binding in bindings_of(function):
        if any(used.name in dependent for used in used_variables(binding.value)):
            dependent.add(binding.var.name)
    return dependent


def reached(names: Iterable[str], step: Callable[[str], Iterable[str]]) -> set[str]:
    """Return ``names`` and all names that can be reached from them; ``step`` returns a name's neighbours."""
    found = set(names)
    waiting = list(found)
    while waiting:
        new = set(step(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def require_whole_graph(module: tvm.IRModule) -> None:
    """Check that a model has the form that the passes require.

    This is one function ``main`` that binds each variable once, with unique names, and returns a tuple.

    Raises:
        ContractError: the module has another form; the message says where.
    """
    function = main_function(module)
    for name, bound in Counter(names_of(function)).items():
        if bound > 1:
            raise ContractError(f"two variables are named {name!r}")
    returned_fields(function)


def returned_fields(function: relax.Function) -> tuple[relax.Expr, ...]:
    """Return the fields of a function's returned tuple; raise `ContractError` if it returns anything else."""
    result = function.body.body
    if isinstance(result, relax.Var):
        for binding in bindings_of(function):
            if binding.var.same_as(result):
                result = binding.value
    if not isinstance(result, relax.Tuple):
        raise ContractError(f"the function returns {result}, not a tuple")
    return tuple(result.fields)


def used_variables(expression: relax.Expr) -> tuple[relax.Var, ...]:
    """Return the variables that an expression reads, each once, in the order of their first use."""
    return tuple(relax.analysis.free_vars(expression))


class Builder(relax.BlockBuilder):  # type: ignore[misc]
    """A block builder that closes its block when an exception leaves its function; TVM's own warns of open blocks."""

    def _exit_function_scope(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is not None and not self._func._is_emit_func_output_called:
            self._end_block()
        super()._exit_function_scope(kind, error, trace)


@ONE_AT_A_TIME
def rewrite_main(module: tvm.IRModule, replace: Replace) -> tvm.IRModule:
    """Return the module with variables of ``main`` replaced by ``replace``.

    The new ``main`` is one dataflow block that returns a tuple of variables.
    """
    function = main_function(module)
    result_name = getattr(function.body.body, "name", "")
    builder = Builder()
    values: dict[str, relax.Expr] = {}
    with builder.function("main", list(function.params)):
        with builder.dataflow():
            for binding in bindings_of(function):
                name = binding.var.name
                if name != result_name:
                    expression = substitute(binding.value, values)
                    replacement = replace(name, expression, builder)
                    values[name] = builder.emit(expression, name_hint=name) if replacement is None else replacement
            fields = [substitute(field, values) for field in returned_fields(function)]
            # Each result must be a variable, so that it can be sent by name.
            fields = [field if isinstance(field, relax.Var) else builder.emit(field) for field in fields]
            outputs = builder.emit_output(relax.Tuple(fields), name_hint=result_name or "outputs")
        builder.emit_func_output(outputs)
    return with_main(module, builder.get()["main"])


def main_pass(name: str) -> Callable[[Replace], Any]:
    """Return a decorator that makes a pass of modules from what it does with each variable of ``main``."""

    def made(replace: Replace) -> Any:
        return tvm.transform.module_pass(lambda module, _: rewrite_main(module, replace), opt_level=0, name=name)

    return made


def with_main(module: tvm.IRModule, rewritten: relax.Function) -> tvm.IRModule:
    """Return the module with another ``main``, which keeps the attributes of the old one."""
    attributes = main_function(module).attrs
    updated = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs, global_infos=module.global_infos)
    updated["main"] = rewritten if attributes is None else rewritten.with_attrs(attributes)
    return updated


@ONE_AT_A_TIME
def new_function(
    name: str, parameters: Iterable[relax.Var], emit: Callable[[relax.BlockBuilder], Iterable[relax.Expr]]
) -> relax.Function:
    """Return a function of one dataflow block with the bindings that ``emit`` makes; it returns a tuple of results."""
    builder = Builder()
    with builder.function(name, list(parameters)):
        with builder.dataflow():
            outputs = builder.emit_output(relax.Tuple(list(emit(builder))), name_hint="outputs")
        builder.emit_func_output(outputs)
    return builder.get()[name]


def substitute(expression: relax.Expr, replacements: Mapping[str, relax.Expr]) -> relax.Expr:
    """Return the expression with each variable whose name is in ``replacements`` replaced.

    The types of calls and tuples are inferred again: shapes are unchanged, devices are those of the replacements.
    """
    leaves = [replacements.get(getattr(leaf, "name", ""), leaf) for leaf in leaves_of(expression)]
    return relax.BlockBuilder().normalize(with_leaves(expression, leaves))


def emit_operations(
    builder: relax.BlockBuilder, operations: Iterable[relax.VarBinding], values: dict[str, relax.Expr]
) -> None:
    """Emit bindings under their names, with variables replaced by ``values``; add the new variables to ``values``."""
    for binding in operations:
        name = binding.var.name
        values[name] = builder.emit(substitute(binding.value, values), name_hint=name)


def emit_again(
    builder: relax.BlockBuilder, binding: relax.VarBinding, replacements: Mapping[str, relax.Expr]
) -> relax.Var:
    """Emit a binding of the same variable, with its operands replaced if ``replacements`` has others; return it."""
    used = used_variables(binding.value)
    if not all(replacements.get(variable.name, variable).same_as(variable) for variable in used):
        binding = relax.VarBinding(binding.var, substitute(binding.value, replacements))
    builder.emit_normalized(binding)
    return binding.var


def operator_name(expression: relax.Expr | None) -> str:
    """Return the name of the operator that an expression calls (``relax.add``), or an empty string."""
    if isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op):
        return str(expression.op.name)
    return ""


def is_tensor_constant(expression: relax.Expr) -> bool:
    return isinstance(expression, tvm.ir.GenericConst) and isinstance(expression.value, tvm.runtime.Tensor)


def constant(array: np.ndarray[Any, Any]) -> relax.Expr:
    """Return a constant of the array's dtype; ``relax.const`` without a dtype converts float64 to float32.

    The values are copied once; ``relax.const`` copies them twice.
    """
    if not array.size or not _is_shared(array.dtype):
        return relax.const(array, array.dtype.name)
    tensor = tvm.runtime.empty(array.shape, array.dtype.name)
    np.from_dlpack(tensor)[...] = array
    return relax.const(tensor)


def array_of(constant: relax.Expr) -> np.ndarray[Any, Any]:
    """Return the values of a tensor constant, to be read only: the array is the constant's memory where numpy can."""
    tensor = constant.value
    return np.from_dlpack(tensor) if _is_shared(np.dtype(str(tensor.dtype))) else tensor.numpy()


def _is_shared(dtype: np.dtype[Any]) -> bool:
    """Return whether numpy knows a dtype under the name that DLPack gives it: not booleans and bfloat16."""
    return dtype.kind in "fiu"


def shape_of(value: relax.Expr | relax.Type) -> tuple[int, ...]:
    """Return the lengths of the axes of a tensor or a tensor type; for a tuple, those of its first field."""
    kind = getattr(value, "ty", value)
    while isinstance(kind, relax.TupleType):
        kind = kind.fields[0]
    return tuple(int(length) for length in kind.shape.values)


def leaves_of(value: relax.Expr) -> tuple[relax.Expr, ...]:
    """Return the variables and constants that an operation reads, including those in tuples, in order."""
    if isinstance(value, relax.Var) or is_tensor_constant(value):
        return (value,)
    if isinstance(value, relax.TupleGetItem):
        return leaves_of(value.tuple_value)
    inner = value.args if isinstance(value, relax.Call) else value.fields if isinstance(value, relax.Tuple) else ()
    return tuple(leaf for part in inner for leaf in leaves_of(part))


def with_leaves(value: relax.Expr, leaves: Sequence[relax.Expr]) -> relax.Expr:
    """Return the operation with its variables and constants replaced by ``leaves``, in the order of `leaves_of`.

    The result has no types yet; the builder infers them.
    """
    remaining = iter(leaves)

    def rebuilt(part: relax.Expr) -> relax.Expr:
        if isinstance(part, relax.Var) or is_tensor_constant(part):
            return next(remaining)
        if isinstance(part, relax.TupleGetItem):
            return relax.TupleGetItem(rebuilt(part.tuple_value), part.index)
        if isinstance(part, relax.Tuple) and leaves_of(part):
            return relax.Tuple([rebuilt(field) for field in part.fields])
        if isinstance(part, relax.Call):
            return relax.Call(part.op, [rebuilt(operand) for operand in part.args], part.attrs, part.ty_args)
        return part

    return rebuilt(value)


def call_like(call: relax.Call, operands: Sequence[relax.Expr], **changed: Any) -> relax.Call:
    """Return the same operation on other operands, with the attributes in ``changed``; the builder infers its type."""
    attributes = call.attrs
    if changed:
        info = type(attributes).__tvm_ffi_type_info__
        values = {entry.name: getattr(attributes, entry.name) for entry in info.fields}
        attributes = tvm.ir.make_node(info.type_key, **{**values, **changed})
    return relax.Call(call.op, list(operands), attributes, call.ty_args)
