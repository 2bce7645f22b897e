"""What people do without a planner: one machine, or all machines with equal layers, parameters or by memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tvm_split.planner.problem import Problem, Stage

ONE_MACHINE = "one machine"
EQUAL_LAYERS = "equal layers"
EQUAL_PARAMETERS = "equal parameters"
BY_MEMORY = "layers by memory"


def baseline_stages(problem: Problem, layers_of: Mapping[str, int]) -> dict[str, tuple[Stage, ...]]:
    """Stages by the baseline's name. Splits use all machines, in the problem's order.

    ``layers_of`` counts a piece's layers. *Equal layers* is what pipelines are split by where nothing was measured;
    *equal parameters* balances the weights; *layers by memory* gives each machine layers in proportion to its memory,
    as exo's ring partitioning does.
    """
    machines = [machine.name for machine in problem.machines]
    pieces = [piece.name for piece in problem.pieces]
    found: dict[str, tuple[Stage, ...]] = {
        f"{ONE_MACHINE}, {name}": (Stage((name,), tuple(pieces)),) for name in machines
    }
    if len(machines) == 1 or len(pieces) < len(machines):
        return found
    layers = [float(layers_of[piece]) for piece in pieces]
    parameters = [float(piece.weight_bytes) for piece in problem.pieces]
    memory = [machine.memory_bytes for machine in problem.machines]
    equal = [1.0] * len(machines)
    for name, weights, shares in (
        (EQUAL_LAYERS, layers, equal),
        (EQUAL_PARAMETERS, parameters, equal),
        (BY_MEMORY, layers, memory if max(memory) < float("inf") else equal),
    ):
        cuts = proportional_cuts(weights, shares)
        found[name] = tuple(
            Stage((machine,), tuple(pieces[start:end]))
            for machine, (start, end) in zip(machines, itertools.pairwise(cuts), strict=True)
        )
    return found


def proportional_cuts(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Where to cut a sequence so that the parts' sums come near ``shares``: their bounds, from 0 to the length.

    Every part gets at least one element.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    cuts = [0]
    wanted = 0.0
    for index, share in enumerate(shares[:-1]):
        wanted += share / sum(shares) * sums[-1]
        first, last = cuts[-1] + 1, len(weights) - (len(shares) - 1 - index)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(sums[cut] - wanted)))
    return [*cuts, len(weights)]
