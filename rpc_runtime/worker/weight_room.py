"""Whether weights, and what a GPU holds beside them, fit into the memory that is free. Pure."""

from __future__ import annotations

import heapq

from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.program.machine_plan import MachinePlan
from tvm_split.rpc_runtime.program.program import StageSpec, weight_bytes

ON_THE_WAY = 2
"""Weights of a GPU's stage that the host holds at a time: the one that was brought there, and the next one."""


def require_room(
    plan: MachinePlan, host_bytes: int, device_bytes: int, *, copies: bool = False, graphs: bool = False
) -> None:
    """Compares what stages take of each memory with what is free there; 0 bytes where that is not known.

    A stage on the CPU takes its weights' bytes of the host. One on a GPU takes them there, and of the host what is on
    its way: `ON_THE_WAY` of its largest. With ``copies`` a GPU has a place, too, for every micro-batch that may have
    come from another machine; with ``graphs`` it has the inputs and outputs of each stage once more. What lies between
    a stage's kernels is not known here. A machine that has stages on its CPU, too, does neither.

    Raises:
        WorkerError: they do not fit; names the machine, the stages and both sides.
    """
    on_host = tuple(stage for stage in plan.stages if stage.device == "cpu")
    on_device = tuple(stage for stage in plan.stages if stage.device != "cpu")
    passing = max(map(_passing_bytes, on_device), default=0)
    arriving = kept = 0
    if on_device and len(on_device) == len(plan.stages):
        arriving = sum(route.queue_depth * route.tensor.size_bytes for route in plan.incoming) if copies else 0
        kept = sum(each.size_bytes for stage in on_device for each in (*stage.inputs, *stage.outputs)) if graphs else 0
    of_device = {
        "for tensors from other machines": arriving,
        "for the inputs and outputs of CUDA graphs (TVM_SPLIT_CUDA_GRAPHS)": kept,
    }
    for place, stages, more, free in (
        ("", plan.stages if passing else on_host, {"on their way to its GPU": passing}, host_bytes),
        ("'s GPU", on_device, of_device, device_bytes),
    ):
        needed = weight_bytes(on_device if place else on_host) + sum(more.values())
        if free and needed > free:
            listed = "".join(f", {each / 1e9:.1f} GB of it {why}" for why, each in more.items() if each)
            raise WorkerError(
                f"machine {plan.machine!r}{place} needs {needed / 1e9:.1f} GB for the weights of {len(stages)} stages "
                f"({', '.join(stage.name for stage in stages)}){listed}, and has {free / 1e9:.1f} GB free. Move "
                "layers to another machine"
            )


def _passing_bytes(stage: StageSpec) -> int:
    return sum(heapq.nlargest(ON_THE_WAY, (weight.tensor.size_bytes for weight in stage.weights)))
