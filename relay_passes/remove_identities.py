"""Remove identities: reshapes and broadcasts to the shape that their operand has.

Requires: a normalised function ``main`` with static shapes.
Ensures: no reshape or broadcast to its operand's own shape is left, and every value is unchanged.
"""

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import operator_name, rewrite_main, shape_of


@tvm.transform.module_pass(opt_level=0, name="RemoveIdentities")  # type: ignore[untyped-decorator]
def remove_identities(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    def replacement(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
        if operator_name(expression) not in ("relax.broadcast_to", "relax.reshape"):
            return None
        operand = expression.args[0]
        return operand if shape_of(expression) == shape_of(operand) else None

    return rewrite_main(module, replacement)
