"""The form that every module has between the passes, its errors, and small readers of that form.

The room may not know the others, so its errors have bases of their own. They are registered, so that they keep their
class when they pass through TVM's pass manager; for the same reason a message is all they carry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import tvm
from tvm import relax
from tvm_ffi import register_error


@register_error
class ContractError(Exception):
    """A module does not have the form that a pass requires, or a pass did not ensure what it promises."""


@register_error
class SelfWaitError(ValueError):
    """A stage would have to wait for its own result; the front door says it in the user's words."""


def main_function(module: tvm.IRModule) -> relax.Function:
    """The function ``main`` of a module, or a `ContractError`."""
    if "main" not in {variable.name_hint for variable in module.get_global_vars()}:
        raise ContractError("the module has no function 'main'")
    return module["main"]


def bindings_of(function: relax.Function) -> Iterator[relax.VarBinding]:
    """All bindings of a function's blocks, in order."""
    if not isinstance(function.body, relax.SeqExpr):
        raise ContractError("the function's body is not normalised to a sequence of bindings")
    for block in function.body.blocks:
        for binding in block.bindings:
            if not isinstance(binding, relax.VarBinding):
                raise ContractError(f"the binding of {binding.var.name!r} is a {type(binding).__name__}")
            yield binding


def names_of(function: relax.Function) -> list[str]:
    """The names of a function's parameters and of what it binds."""
    return [variable.name for variable in (*function.params, *(binding.var for binding in bindings_of(function)))]


def operations_of(function: relax.Function) -> list[relax.VarBinding]:
    """All bindings but that of the returned tuple."""
    return [binding for binding in bindings_of(function) if not binding.var.same_as(function.body.body)]


def dependent_names(function: relax.Function) -> set[str]:
    """The names of the parameters, and of the variables that depend on one: the others are tables and masks."""
    dependent = {parameter.name for parameter in function.params}
    for binding in bindings_of(function):
        if any(used.name in dependent for used in used_variables(binding.value)):
            dependent.add(binding.var.name)
    return dependent


def require_whole_graph(module: tvm.IRModule) -> None:
    """Check the form in which a model enters the passes.

    One function ``main`` that binds each variable once under a name of its own and returns a tuple of variables (its
    parameters among them). Raises `ContractError` that names the first variable which does not fit.
    """
    function = main_function(module)
    for name, count in Counter(names_of(function)).items():
        if count > 1:
            raise ContractError(f"two variables are named {name!r}")
    returned_fields(function)


def returned_fields(function: relax.Function) -> tuple[relax.Expr, ...]:
    """The expressions that a function returns as a tuple, looked up through the variable that holds the tuple."""
    result = function.body.body
    if isinstance(result, relax.Var):
        for binding in bindings_of(function):
            if binding.var.same_as(result):
                result = binding.value
    if not isinstance(result, relax.Tuple):
        raise ContractError(f"the function returns {result}, not a tuple")
    return tuple(result.fields)


def used_variables(expression: relax.Expr) -> tuple[relax.Var, ...]:
    """The variables that an expression reads, each once, in the order of their first use."""
    found: dict[str, relax.Var] = {}

    def visit(node: relax.Expr) -> None:
        if isinstance(node, relax.Var):
            found.setdefault(node.name, node)

    relax.analysis.post_order_visit(expression, visit)
    return tuple(found.values())
