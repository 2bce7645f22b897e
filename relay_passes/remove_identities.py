"""Remove identities: reshapes and broadcasts to the shape that their operand has.

Requires: a normalised function ``main`` with static shapes.
Ensures: no reshape or broadcast to its operand's own shape is left, and every value is unchanged.
"""

from tvm import relax

from relay_passes.ir import main_pass, operator_name, shape_of


@main_pass("RemoveIdentities")
def remove_identities(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
    if operator_name(expression) not in ("relax.broadcast_to", "relax.reshape"):
        return None
    operand = expression.args[0]
    return operand if shape_of(expression) == shape_of(operand) else None
