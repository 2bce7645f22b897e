"""Extern kernels: ``main`` calls compiled kernels by their names, in libraries that the module imports.

Requires: a module with ``main`` and scheduled kernels.
Ensures: the module has ``main`` alone, and `tvm.relax.build` links the libraries with its code.
"""

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm_ffi import structural_map

from relay_passes.costs import tensors_in
from relay_passes.ir import main_function, operator_name


def with_extern_kernels(module: tvm.IRModule, libraries: Sequence[Any]) -> tvm.IRModule:
    """Return the module without its kernels; ``libraries`` are modules of TVM that have these, under the same names."""

    def extern(call: relax.Call) -> relax.Expr:
        if operator_name(call) != "relax.call_tir":
            return call
        return relax.call_dps_packed(str(call.args[0].name_hint), call.args[1], out_ty=list(tensors_in(call.ty)))

    main = structural_map(main_function(module), (relax.Call, extern))
    return tvm.IRModule({"main": main}, global_infos=module.global_infos).with_attr("external_mods", list(libraries))
