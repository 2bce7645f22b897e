"""Machines that share cores: what they keep busy of these together, and how short that lets the period be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rpc_runtime.program.program import CLIENT
from tvm_split.planner.problem import CoresLoad, MachineLoad, Problem


def cores_loads(
    problem: Problem, loads: Sequence[MachineLoad], client_tensors: float, client_bytes: float
) -> tuple[CoresLoad, ...]:
    """Of all cores that the machines of a plan share.

    A machine keeps its ``cores`` busy while it computes, serialising included, the client one while it sends or
    receives: so many tensors of so many bytes.
    """
    own = {machine.name: machine.cores for machine in problem.machines} if problem.shared_cores else {}
    busy = {load.machine: load.compute_seconds * own[load.machine] for load in loads if own}
    transfers = client_tensors * problem.client_transfer_seconds
    busy[CLIENT] = transfers + client_bytes * problem.client_transfer_seconds_per_byte
    found = []
    for shared in problem.shared_cores:
        here = tuple(name for name in shared.machines if name in busy)
        if here:
            wanted = sum(own.get(name, 0) for name in here)
            found.append(CoresLoad(here, shared.cores, math.fsum(busy[name] for name in here), wanted))
    return tuple(found)


def limit_of(load: CoresLoad) -> tuple[float, str]:
    """The shortest period that shared cores allow, and what it is that sets it."""
    cores = "one core" if load.cores == 1 else f"{load.cores} cores"
    names = ["the client" if name == CLIENT else name for name in load.machines]
    sharing = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    verb = "has" if len(names) == 1 else "share"
    return load.least_period_seconds, f"computing on the {cores} that {sharing} {verb}"
