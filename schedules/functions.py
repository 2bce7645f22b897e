"""Lower functions of floats to the C library, where TVM's formulas lose accuracy or are not compiled in vectors.

TVM computes atanh(1e-20) as log(1) / 2 = 0, and has no code for sinh and cosh of vectors. Half precision becomes
float32 when a model is imported.
"""

from tvm import relax, te, tirx
from tvm.relax import BlockBuilder

from schedules.relax_tools import default_legalization, operator_of

_SUFFIXES = {"float32": "f", "float64": ""}
"""Suffixes of the C library's names."""
FUNCTIONS = tuple(
    f"relax.{name}" for name in ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan"]
)


def legalize_function(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower an operator to the C library's function of the same name; TVM lowers dtypes except float32 and float64."""
    dtype, name = str(call.ty.dtype), operator_of(call).rsplit(".", 1)[-1]
    if dtype not in _SUFFIXES:
        return default_legalization(builder, call)

    def compute(x: te.Tensor) -> te.Tensor:
        function = f"{name}{_SUFFIXES[dtype]}"
        return te.compute(x.shape, lambda *index: tirx.call_pure_extern(dtype, function, x[index]), name=name)

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)
