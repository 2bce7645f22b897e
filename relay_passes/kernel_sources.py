"""Kernel sources: which operations of the graph before fusion each kernel computes.

Requires: ``main`` after lowering, and the same ``main`` after FuseOps; in each, variables have distinct names.
Ensures: nothing is changed; the answer names every variable before fusion exactly once.

FuseOps gives what it groups fresh names and shares the functions of equal groups, so names do not lead back. Both forms
are walked in their order instead: a call of one of the functions and the group that holds it do the same operation on
the same values.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from tvm_split.relay_passes.contract import bindings_of, main_function
from tvm_split.relay_passes.rewrite import is_tensor_constant

Key = tuple[object, ...]


def kernel_sources(lowered: tvm.IRModule, fused: tvm.IRModule) -> dict[str, tuple[str, ...]]:
    """For every variable that the fused ``main`` binds, the variables of the lowered ``main`` that stand behind it.

    The last one names the value itself; the ones before are computed on the way. Order is that of the lowered ``main``.
    """
    originals: dict[Key, list[str]] = {}
    roots: dict[str, str] = {}
    for binding in bindings_of(main_function(lowered)):
        name, value = binding.var.name, binding.value
        if isinstance(value, relax.Var):
            roots[name] = roots.get(value.name, value.name)
            continue
        own = {used: roots.get(used, used) for used in _variables(value)}
        originals.setdefault(_key(value, own), []).append(name)
    # A lowering may bind its result once more under the operator's own name: both are this kernel's.
    other_names: dict[str, list[str]] = {}
    for name, root in roots.items():
        other_names.setdefault(root, []).append(name)
    found = _Walk(originals, fused).sources()
    return {
        name: tuple(each for source in sources for each in (source, *other_names.get(source, ())))
        for name, sources in found.items()
    }


class _Walk:
    """Finds for each operation of the fused module the original that does the same; each original is taken once."""

    def __init__(self, originals: dict[Key, list[str]], module: tvm.IRModule) -> None:
        self._originals = originals
        self._module = module

    def sources(self) -> dict[str, tuple[str, ...]]:
        function = main_function(self._module)
        values = {parameter.name: parameter.name for parameter in function.params}
        found: dict[str, tuple[str, ...]] = {}
        for binding in bindings_of(function):
            if isinstance(binding.value, relax.Var):
                values[binding.var.name] = values.get(binding.value.name, binding.value.name)
                continue
            taken = self._taken(binding.value, values)
            found[binding.var.name] = taken
            if taken:
                values[binding.var.name] = taken[-1]
        return found

    def _taken(self, value: relax.Expr, values: Mapping[str, str]) -> tuple[str, ...]:
        if not (isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)):
            waiting = self._originals.get(_key(value, values), [])
            # Equal operations on equal values may stand there twice; they are met in the same order.
            return (waiting.pop(0),) if waiting else ()
        group = self._module[value.op]
        inside = {
            parameter.name: identity
            for parameter, argument in zip(group.params, value.args, strict=True)
            if (identity := _identity(argument, values)) is not None
        }
        taken: list[str] = []
        for binding in bindings_of(group):
            names = self._taken(binding.value, inside)
            taken += names
            if names:
                inside[binding.var.name] = names[-1]
        return tuple(taken)


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


def _variables(expression: relax.Expr) -> list[str]:
    found: list[str] = []
    relax.analysis.post_order_visit(
        expression, lambda node: found.append(node.name) if isinstance(node, relax.Var) else None
    )
    return found
