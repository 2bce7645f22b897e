"""Unique names: no two variables of ``main`` share a name.

Requires: a normalised function ``main``.
Ensures: its variables have distinct names; a function without duplicates is unchanged.

The passes of this package look variables up by name. TVM's mutators number new variables ``lv``, ``lv1``, … without
checking the existing names. So a layer with such a name could be confused with another value.
"""

import tvm
from tvm import relax
from tvm.ir.transform import PassContext
from tvm_ffi import structural_map

from relay_passes.ir import free_name, main_function, names_of, with_main


@tvm.transform.module_pass(opt_level=0, name="UniqueNames")  # type: ignore[untyped-decorator]
def unique_names(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    """Rename variables of ``main`` that share a name."""
    function = main_function(module)
    names = names_of(function)
    if len(set(names)) == len(names):
        return module
    taken: set[str] = set()
    unique: dict[int, relax.Var] = {}

    def renamed(variable: relax.Var) -> relax.Var:
        if hash(variable) not in unique:
            name = free_name(variable.name, taken)
            unique[hash(variable)] = variable if name == variable.name else type(variable)(name, variable.ty)
        return unique[hash(variable)]

    return with_main(module, structural_map(function, ((relax.Var, relax.DataflowVar), renamed)))
