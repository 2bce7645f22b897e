"""Unique names: no two variables of ``main`` share a name.

Requires: a normalised function ``main``.
Ensures: its variables have distinct names; a function without duplicates is unchanged.

The passes of this package look variables up by name. TVM's mutators number new variables ``lv``, ``lv1``, … without
checking the existing names. So a layer with such a name could be confused with another value.
"""

import tvm
from tvm import relax
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from relay_passes.ir import free_name, main_function, names_of, with_main


@tvm.transform.module_pass(opt_level=0, name="UniqueNames")  # type: ignore[untyped-decorator]
def unique_names(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    """Rename variables of ``main`` that share a name."""
    function = main_function(module)
    names = names_of(function)
    if len(set(names)) == len(names):
        return module
    return with_main(module, _Renamer(set()).visit_expr(function))


@mutator
class _Renamer(PyExprMutator):  # type: ignore[misc]
    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._taken = names

    def visit_var_def_(self, variable: relax.Var) -> relax.Var:
        return self._renamed(variable, relax.Var)

    def visit_dataflow_var_def_(self, variable: relax.DataflowVar) -> relax.Var:
        return self._renamed(variable, relax.DataflowVar)

    def _renamed(self, variable: relax.Var, kind: type) -> relax.Var:
        name = free_name(variable.name, self._taken)
        if name == variable.name:
            return variable
        new = kind(name, variable.ty)
        self.set_var_remap(variable, new)
        return new
