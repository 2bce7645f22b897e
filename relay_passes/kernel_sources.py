"""Kernel sources: map each kernel to the operations of the graph before fusion that it computes.

Requires: ``main`` after lowering, and the same ``main`` after FuseOps; in each, variables have distinct names.
Ensures: nothing is changed; the result names every variable before fusion exactly once.

FuseOps gives grouped operations new names, and equal groups share one function. So names cannot identify the originals.
Instead, both forms are walked in order. An operation inside a group matches the original that does the same operation
on the same values.
"""

from collections.abc import Mapping
from itertools import chain

import tvm
from tvm import relax

from relay_passes.ir import bindings_of, is_tensor_constant, main_function, used_variables

Key = tuple[object, ...]


def kernel_sources(lowered: tvm.IRModule, fused: tvm.IRModule) -> dict[str, tuple[str, ...]]:
    """Return, for every variable of the fused ``main``, the variables of the lowered ``main`` that its kernel computes.

    They are in the order of the lowered ``main``. The last one is the value itself, the others are intermediate values.
    """
    originals: dict[Key, list[str]] = {}
    roots: dict[str, str] = {}
    # A lowering may bind its result a second time, under the operator's name: both names belong to the kernel.
    other_names: dict[str, list[str]] = {}
    for binding in bindings_of(main_function(lowered)):
        name, value = binding.var.name, binding.value
        if isinstance(value, relax.Var):
            roots[name] = roots.get(value.name, value.name)
            other_names.setdefault(roots[name], []).append(name)
            continue
        identities = {used.name: roots.get(used.name, used.name) for used in used_variables(value)}
        originals.setdefault(_key(value, identities), []).append(name)
    main = main_function(fused)
    matches = _sources(main, {parameter.name: parameter.name for parameter in main.params}, fused, originals)
    return {
        name: tuple(variable for source in sources for variable in (source, *other_names.get(source, ())))
        for name, sources in matches.items()
    }


def _sources(
    function: relax.Function, values: dict[str, str], module: tvm.IRModule, originals: Mapping[Key, list[str]]
) -> dict[str, tuple[str, ...]]:
    """Return, for each variable of a fused function, the variables of the lowered ``main`` that match it.

    ``values`` maps the function's parameters to the original variables with the same values; its own variables are
    added. A match is removed from ``originals``, so that each original is matched once.
    """
    matches: dict[str, tuple[str, ...]] = {}
    for binding in bindings_of(function):
        name, value = binding.var.name, binding.value
        if isinstance(value, relax.Var):
            if value.name in values:
                values[name] = values[value.name]
            continue
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            group = module[value.op]
            identities = (_identity(argument, values) for argument in value.args)
            inside = {
                parameter.name: identity
                for parameter, identity in zip(group.params, identities, strict=True)
                if identity is not None
            }
            matches[name] = tuple(chain.from_iterable(_sources(group, inside, module, originals).values()))
        else:
            # Equal operations on equal values may occur twice; both forms have them in the same order.
            waiting = originals.get(_key(value, values), [])
            matches[name] = (waiting.pop(0),) if waiting else ()
        if matches[name]:
            values[name] = matches[name][-1]
    return matches


def _key(value: relax.Expr, values: Mapping[str, str]) -> Key:
    """Return a key of an expression's operator and operand identities; equal keys mean equal values."""
    if isinstance(value, relax.Call):
        operator = str(getattr(value.op, "name", None) or getattr(value.op, "name_hint", ""))
        return (operator, *(_identity(argument, values) for argument in value.args))
    return (type(value).__name__, getattr(value, "index", None), _identity(value, values))


def _identity(expression: relax.Expr, values: Mapping[str, str]) -> str | None:
    if isinstance(expression, relax.Var):
        return values.get(expression.name)
    if is_tensor_constant(expression):
        return f"constant at {expression.value.data_ptr()}"
    if isinstance(expression, relax.Tuple):
        return f"({', '.join(str(_identity(field, values)) for field in expression.fields)})"
    if isinstance(expression, relax.TupleGetItem):
        return f"{_identity(expression.tuple_value, values)}[{expression.index}]"
    return str(expression)
