"""Content names: name each kernel after its operators and a digest of its TIR.

Requires: a module with ``main`` and scheduled kernels.
Ensures: equal kernels have one name and are one function, in every network and every cut of it, so that a compiled
kernel can be found by its name: ``fused_conv2d_add_relu_3fa9c1d2e4b7``.
"""

import hashlib
import re

import tvm
from tvm import tirx
from tvm.ir.transform import PassContext
from tvm.relax.expr import _update_type
from tvm.relax.expr_functor import PyExprMutator, mutator

from relay_passes.ir import main_function

DIGEST_LETTERS = 16
"""Hexadecimal digits of a digest in a name: enough to be distinct."""
NUMBER = re.compile(r"\d+(?=_|$)")
"""What TVM appends to the names of equal operators in one network."""


@tvm.transform.module_pass(opt_level=0, name="ContentNames")
class ContentNames:
    """Rename the kernels of a module, and merge equal ones."""

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        renamed = tvm.IRModule(attrs=module.attrs, global_infos=module.global_infos)
        variables: dict[str, tvm.ir.GlobalVar] = {}
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc):
                name = content_name(variable.name_hint, function)
                if name not in renamed:
                    renamed[name] = function.with_attr("global_symbol", name)
                    _update_type(renamed.get_global_var(name), variable.ty)
                variables[variable.name_hint] = renamed.get_global_var(name)
        renamed["main"] = _Renamer(variables).visit_expr(main_function(module))
        return renamed


def content_name(name: str, kernel: tirx.PrimFunc) -> str:
    """Return a kernel's name without numbers, and with a digest of what it computes and how."""
    text = kernel.without_attr("global_symbol").script(show_meta=True)
    return f"{NUMBER.sub('', name)}_{hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LETTERS]}"


@mutator
class _Renamer(PyExprMutator):  # type: ignore[misc]
    def __init__(self, variables: dict[str, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self._variables = variables

    def visit_global_var_(self, variable: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self._variables[variable.name_hint]
