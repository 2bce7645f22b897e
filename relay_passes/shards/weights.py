"""How many bytes of weights each machine holds of a region that is split."""

from __future__ import annotations

from tvm import relax

from tvm_split.relay_passes.contract import bindings_of, main_function
from tvm_split.relay_passes.rewrite import is_tensor_constant
from tvm_split.relay_passes.shards.region import Sharded


def weight_bytes(sharded: Sharded) -> dict[str, int]:
    """The constants that the machines' operations take, each once a machine, by the machine's name."""
    held: dict[str, dict[relax.Expr, int]] = {}
    for binding in bindings_of(main_function(sharded.module)):
        machine = sharded.machine_of.get(binding.var.name)
        if machine is not None:
            constants = held.setdefault(machine, {})

            def note(node: relax.Expr, constants: dict[relax.Expr, int] = constants) -> None:
                if is_tensor_constant(node):
                    constants[node] = node.value.numpy().nbytes

            relax.analysis.post_order_visit(binding.value, note)
    return {machine: sum(constants.values()) for machine, constants in held.items()}
