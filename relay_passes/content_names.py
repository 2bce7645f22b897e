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
from tvm_ffi import structural_map

from relay_passes.ir import main_function

DIGEST_LETTERS = 16
"""Hexadecimal digits of a digest in a name: enough to be distinct."""
NAME_LETTERS = 80
"""Letters of a kernel's own name: polynomials are fused from a hundred operators."""
NUMBER = re.compile(r"\d+(?=_|$)")
"""What TVM appends to the names of equal operators in one network."""


@tvm.transform.module_pass(opt_level=0, name="ContentNames")  # type: ignore[untyped-decorator]
def content_names(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    """Rename the kernels of a module, and merge equal ones."""
    renamed = tvm.IRModule(attrs=module.attrs, global_infos=module.global_infos)
    variables: dict[str, tvm.ir.GlobalVar] = {}
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            name = content_name(variable.name_hint, function)
            if name not in renamed:
                renamed[name] = function.with_attr("global_symbol", name)
                _update_type(renamed.get_global_var(name), variable.ty)
            variables[variable.name_hint] = renamed.get_global_var(name)
    main = main_function(module)
    renamed["main"] = structural_map(main, (tvm.ir.GlobalVar, lambda variable: variables[variable.name_hint]))
    return renamed


def content_name(name: str, kernel: tirx.PrimFunc) -> str:
    """Return the first `NAME_LETTERS` of a kernel's name without numbers, and a digest of what it computes and how."""
    text = kernel.without_attr("global_symbol").script(show_meta=True)
    return f"{NUMBER.sub('', name)[:NAME_LETTERS]}_{hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LETTERS]}"
