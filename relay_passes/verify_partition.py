"""Verify: putting the stages back together gives the original function.

Requires: the whole graph and the module that was partitioned from it.
Ensures: nothing but the check; the module is returned as it is, or a `ContractError` names the output that differs.

Both functions are reduced to numbered values (value numbering: equal operations on equal values are one value), so the
order of independent operations and the copies of values that depend on no input make no difference, and nothing else
is let through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tvm
from tvm import relax
from tvm.ir.transform import PassContext
from tvm_ffi.structural import StructuralKey, structural_equal

from tvm_split.relay_passes.contract import bindings_of, is_transfer, main_function, returned_fields
from tvm_split.relay_passes.errors import ContractError
from tvm_split.relay_passes.substitute import substitute, without_device


@tvm.transform.module_pass(opt_level=0, name="VerifyPartition")
class VerifyPartition:
    """Check a partitioned module against the whole graph it came from."""

    def __init__(self, whole: tvm.IRModule) -> None:
        self.whole = whole

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        original, together = main_function(self.whole), main_function(module)
        if [parameter.name for parameter in original.params] != [parameter.name for parameter in together.params]:
            raise ContractError(f"the parameters are {list(together.params)}, not {list(original.params)} as before")
        numbering = _Numbering(original.params)
        expected = numbering.values_of(original, self.whole)
        actual = numbering.values_of(together, module)
        if len(expected) != len(actual):
            raise ContractError(f"the stages return {len(actual)} tensors, the original function {len(expected)}")
        for position, (before, after) in enumerate(zip(expected, actual, strict=True)):
            if not structural_equal(before, after):
                raise ContractError(
                    f"output {position} of the stages put together is not that of the original function: "
                    f"{after} instead of {before}"
                )
        return module


class _Numbering:
    """Gives every distinct value one variable, whatever function computes it."""

    def __init__(self, parameters: Sequence[relax.Var]) -> None:
        self._parameters = {
            parameter.name: relax.Var(parameter.name, without_device(parameter.ty)) for parameter in parameters
        }
        self._known: dict[StructuralKey, relax.Var] = {}

    def values_of(self, function: relax.Function, module: tvm.IRModule) -> list[relax.Expr]:
        """The numbered values that a function returns; calls of the module's other functions are looked into."""
        values: dict[str, relax.Expr] = dict(self._parameters)
        self._number(bindings_of(function), values, module)
        return [substitute(field, values) for field in returned_fields(function)]

    def _number(
        self, bindings: Iterator[relax.VarBinding], values: dict[str, relax.Expr], module: tvm.IRModule
    ) -> None:
        for binding in bindings:
            name, value = binding.var.name, binding.value
            if is_transfer(value):
                values[name] = substitute(value.args[0], values)
            elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
                arguments = [substitute(argument, values) for argument in value.args]
                values[name] = self._call(module[value.op], arguments, module)
            else:
                expression = substitute(value, values)
                if isinstance(expression, relax.TupleGetItem) and isinstance(expression.tuple_value, relax.Tuple):
                    expression = expression.tuple_value.fields[expression.index]
                is_computed = not isinstance(expression, relax.Tuple | relax.Var)
                values[name] = self._variable_for(expression, binding.var) if is_computed else expression

    def _call(self, function: relax.Function, arguments: Sequence[relax.Expr], module: tvm.IRModule) -> relax.Expr:
        values = {parameter.name: value for parameter, value in zip(function.params, arguments, strict=True)}
        self._number(bindings_of(function), values, module)
        return relax.Tuple([substitute(field, values) for field in returned_fields(function)])

    def _variable_for(self, expression: relax.Expr, bound: relax.Var) -> relax.Var:
        fresh = relax.Var(bound.name, without_device(bound.ty))
        return self._known.setdefault(StructuralKey(expression), fresh)
