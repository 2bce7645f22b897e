"""The required form of modules between the passes, its errors, and helpers that read modules of that form.

This package may not import the packages above it, so its errors have their own bases. They are registered with TVM, so
that they keep their class when they pass through its pass manager. For the same reason they carry only a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import tvm
from tvm import relax
from tvm_ffi import register_error


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


def operations_of(function: relax.Function) -> list[relax.VarBinding]:
    """Return all bindings of a function except that of the returned tuple."""
    return [binding for binding in bindings_of(function) if not binding.var.same_as(function.body.body)]


def dependent_names(function: relax.Function) -> set[str]:
    """Return the names of the parameters and of the variables that depend on one; the others are tables and masks."""
    dependent = {parameter.name for parameter in function.params}
    for binding in bindings_of(function):
        if any(used.name in dependent for used in used_variables(binding.value)):
            dependent.add(binding.var.name)
    return dependent


def require_whole_graph(module: tvm.IRModule) -> None:
    """Check that a model has the form that the passes require.

    This is one function ``main`` that binds each variable once, with unique names, and returns a tuple.

    Raises:
        ContractError: the module has another form; the message says where.
    """
    function = main_function(module)
    for name, count in Counter(names_of(function)).items():
        if count > 1:
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
    found: dict[str, relax.Var] = {}

    def visit(node: relax.Expr) -> None:
        if isinstance(node, relax.Var):
            found.setdefault(node.name, node)

    relax.analysis.post_order_visit(expression, visit)
    return tuple(found.values())
