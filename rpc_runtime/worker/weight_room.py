"""Whether weights fit into the memory that a machine, and its GPU, have free. Pure."""

from __future__ import annotations

import heapq

from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.program.machine_plan import MachinePlan
from tvm_split.rpc_runtime.program.program import StageSpec, weight_bytes

ON_THE_WAY = 2
"""Weights of a GPU's stage that the host holds at a time: the one that was brought there, and the next one."""


def require_room(plan: MachinePlan, host_bytes: int, device_bytes: int) -> None:
    """Compares what stages take of each memory with what is free there; 0 bytes where that is not known.

    A stage on the CPU takes its weights' bytes of the host. One on a GPU takes them there, and of the host what is on
    its way: `ON_THE_WAY` of its largest.

    Raises:
        WorkerError: they do not fit; names the machine, the stages and both sides.
    """
    on_host = tuple(stage for stage in plan.stages if stage.device == "cpu")
    on_device = tuple(stage for stage in plan.stages if stage.device != "cpu")
    held, passing = weight_bytes(on_host), max(map(_passing_bytes, on_device), default=0)
    for place, stages, needed, free in (
        ("", plan.stages if passing else on_host, held + passing, host_bytes),
        ("'s GPU", on_device, weight_bytes(on_device), device_bytes),
    ):
        if free and needed > free:
            on_its_way = f", {passing / 1e9:.1f} GB of it on their way to its GPU" if passing and not place else ""
            raise WorkerError(
                f"machine {plan.machine!r}{place} needs {needed / 1e9:.1f} GB for the weights of {len(stages)} stages "
                f"({', '.join(stage.name for stage in stages)}){on_its_way}, and has {free / 1e9:.1f} GB free. Move "
                "layers to another machine"
            )


def _passing_bytes(stage: StageSpec) -> int:
    return sum(heapq.nlargest(ON_THE_WAY, (weight.tensor.size_bytes for weight in stage.weights)))
