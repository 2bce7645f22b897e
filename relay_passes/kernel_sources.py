"""Kernel sources: which operations of the graph before fusion each kernel computes.

Requires: ``main`` after lowering, and the same ``main`` after FuseOps; in each, variables have distinct names.
Ensures: nothing is changed; the answer names every variable before fusion exactly once.

FuseOps gives what it groups fresh names and shares the functions of equal groups, so names do not lead back. Both forms
are walked in their order instead: a call of one of the functions and the group that holds it do the same operation on
the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import tvm
from tvm import relax

from relay_passes.contract import bindings_of, main_function, used_variables
from relay_passes.rewrite import is_tensor_constant

Key = tuple[object, ...]


def kernel_sources(lowered: tvm.IRModule, fused: tvm.IRModule) -> dict[str, tuple[str, ...]]:
    """For every variable that the fused ``main`` binds, the variables of the lowered ``main`` that stand behind it.

    The last one names the value itself; the ones before are computed on the way. Order is that of the lowered ``main``.
    """
    originals: dict[Key, list[str]] = {}
    roots: dict[str, str] = {}
    # A lowering may bind its result once more under the operator's own name: both are this kernel's.
    other_names: dict[str, list[str]] = {}
    for binding in bindings_of(main_function(lowered)):
        name, value = binding.var.name, binding.value
        if isinstance(value, relax.Var):
            roots[name] = roots.get(value.name, value.name)
            other_names.setdefault(roots[name], []).append(name)
            continue
        own = {used.name: roots.get(used.name, used.name) for used in used_variables(value)}
        originals.setdefault(_key(value, own), []).append(name)
    main = main_function(fused)
    found = _sources(main, {each.name: each.name for each in main.params}, fused, originals)
    return {
        name: tuple(each for source in sources for each in (source, *other_names.get(source, ())))
        for name, sources in found.items()
    }


def _sources(
    function: relax.Function, values: dict[str, str], module: tvm.IRModule, originals: Mapping[Key, list[str]]
) -> dict[str, tuple[str, ...]]:
    """For each operation of a function of the fused module the originals that do the same; each is taken once.

    ``values`` are the identities of the function's parameters.
    """
    found: dict[str, tuple[str, ...]] = {}
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
            found[name] = tuple(chain.from_iterable(_sources(group, inside, module, originals).values()))
        else:
            # Equal operations on equal values may stand there twice; they are met in the same order.
            waiting = originals.get(_key(value, values), [])
            found[name] = (waiting.pop(0),) if waiting else ()
        if found[name]:
            values[name] = found[name][-1]
    return found


def _key(value: relax.Expr, values: Mapping[str, str]) -> Key:
    """What an expression computes, with its operands by identity: equal keys compute equal values."""
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
