"""Runs a kernel that is scheduled for a GPU on this machine's CPU: its threads one after another.

Between scheduling and lowering, a function with threads means the same as one with plain loops in their place and with
plain memory for shared and local buffers: where threads load a tile together, that load is a loop nest of its own over
all threads, inside the loops of the threads that use it, and thus runs whole for each of them. What is proved like
this is indexing, edges and sums; not barriers, which TVM's lowering inserts afterwards, nor tensor core instructions,
which have no body to run.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx


def without_threads(module: tvm.IRModule) -> tvm.IRModule:
    """Every PrimFunc with serial loops for threads, and without memory scopes."""
    functions = {
        variable: _serial(function) if isinstance(function, tirx.PrimFunc) else function
        for variable, function in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def _serial(function: tirx.PrimFunc) -> tirx.PrimFunc:
    def loop(statement: tirx.For) -> tirx.For:
        if statement.kind != tirx.ForKind.THREAD_BINDING:
            return statement
        return tirx.For(
            statement.loop_var, statement.min, statement.extent, tirx.ForKind.SERIAL, statement.body, None, {}
        )

    return tvm_ffi.structural_map(function, [(tirx.For, loop)])
