"""Plans by simple rules, to compare with: one machine, or all with equal layers, parameters, or estimated cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm_split.errors import PlanError
from tvm_split.placement.by_hand import completed
from tvm_split.placement.graph import LayerGraph
from tvm_split.placement.problem import Problem, Stage

if TYPE_CHECKING:
    from tvm_split.cluster.machine import Machine

ONE_MACHINE = "one machine"
EQUAL_LAYERS = "equal layers"
EQUAL_PARAMETERS = "equal parameters"


def baseline_stages(problem: Problem, layers_of: Mapping[str, int]) -> dict[str, tuple[Stage, ...]]:
    """Map the name of each baseline to its stages. Splits use all machines, in the problem's order.

    ``layers_of`` has the number of layers of each piece. *Equal layers* is the usual split where nothing was measured,
    *equal parameters* balances the weights.
    """
    machines = [machine.name for machine in problem.machines]
    pieces = [piece.name for piece in problem.pieces]
    baselines: dict[str, tuple[Stage, ...]] = {
        f"{ONE_MACHINE}, {name}": (Stage((name,), tuple(pieces)),) for name in machines
    }
    if len(machines) == 1 or len(pieces) < len(machines):
        return baselines
    layers = [float(layers_of[piece]) for piece in pieces]
    parameters = [float(piece.weight_bytes) for piece in problem.pieces]
    for name, weights in ((EQUAL_LAYERS, layers), (EQUAL_PARAMETERS, parameters)):
        cuts = proportional_cuts(weights, [1.0] * len(machines))
        baselines[name] = tuple(
            Stage((machine,), tuple(pieces[start:end]))
            for machine, (start, end) in zip(machines, itertools.pairwise(cuts), strict=True)
        )
    return baselines


def proportional_cuts(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Return positions that cut ``weights`` into parts whose sums are nearly proportional to ``shares``.

    The first position is 0, the last is the length. Every part gets at least one element.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    cuts = [0]
    target = 0.0
    for index, share in enumerate(shares[:-1]):
        target += share / sum(shares) * sums[-1]
        first, last = cuts[-1] + 1, len(weights) - (len(shares) - 1 - index)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(sums[cut] - target)))
    return [*cuts, len(weights)]


def stages_of_equal_cost(
    graph: LayerGraph, seconds: Mapping[str, float], machines: Sequence[Machine]
) -> tuple[Stage, ...]:
    """Cut the layers, in the order of execution, into one stage per entry of ``machines``.

    ``seconds`` are the layers' estimates on one core; a machine with twice the threads is assumed to be twice as fast.

    Raises:
        PlanError: the model has fewer places to cut than the stages need.
    """
    units, count = graph.units, len(machines)
    if count > max(len(units), 1):
        raise PlanError(
            f"{count} stages were asked for, but the model can be cut into {len(units)} at most; ask for fewer"
        )
    costs = [sum(seconds[layer] for layer in unit) for unit in units]
    cuts = proportional_cuts(costs, [machine.threads for machine in machines])
    layers = (tuple(itertools.chain(*units[start:end])) for start, end in itertools.pairwise(cuts))
    return completed(graph, [Stage((machine.name,), part) for machine, part in zip(machines, layers, strict=True)])
