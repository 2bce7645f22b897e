"""Whether weights, and what a GPU holds beside them, fit into the memory that is free. Pure."""

from __future__ import annotations

import heapq

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.program import StageSpec, weight_bytes
from rpc_runtime.program.routes import MachineProgram

ON_THE_WAY = 2
"""Weights of a GPU's stage that the host holds at a time: the one that was brought there, and the next one."""


def require_room(plan: MachineProgram, host_bytes: int, device_bytes: int) -> None:
    """Compares what stages take of each memory with what is free there; 0 bytes where that is not known.

    A stage on the CPU takes its weights' bytes of the host. One on a GPU takes them there, and of the host what is on
    its way: `ON_THE_WAY` of its largest. A GPU also has a buffer for every micro-batch that may have come from another
    machine, unless the machine has stages on its CPU, too. What lies between a stage's kernels is not known here.

    Raises:
        WorkerError: they do not fit; names the machine, the stages and both sides.
    """
    on_host = tuple(stage for stage in plan.stages if stage.device == "cpu")
    on_device = tuple(stage for stage in plan.stages if stage.device != "cpu")
    passing = max(map(_passing_bytes, on_device), default=0)
    arriving = 0
    if on_device and not on_host:
        arriving = sum(route.depth * route.tensor.size_bytes for route in plan.incoming)
    for place, stages, more, why, free in (
        ("", plan.stages if passing else on_host, passing, "on their way to its GPU", host_bytes),
        ("'s GPU", on_device, arriving, "for tensors from other machines", device_bytes),
    ):
        needed = weight_bytes(on_device if place else on_host) + more
        if free and needed > free:
            listed = f", {more / 1e9:.1f} GB of it {why}" if more else ""
            raise WorkerError(
                f"machine {plan.machine!r}{place} needs {needed / 1e9:.1f} GB for the weights of {len(stages)} stages "
                f"({', '.join(stage.name for stage in stages)}){listed}, and has {free / 1e9:.1f} GB free. Move "
                "layers to another machine"
            )


def _passing_bytes(stage: StageSpec) -> int:
    return sum(heapq.nlargest(ON_THE_WAY, (weight.tensor.size_bytes for weight in stage.weights)))
