"""Problems with many machines, as in laboratories, and simple ways to split a network over them.

Machines of a larger problem begin with those of a smaller one: the same seed gives the same first machines.
"""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Literal

from tvm_split.errors import PlanError
from tvm_split.placement.problem import Edge, Piece, Problem, ProblemLink, ProblemMachine, Stage
from tvm_split.placement.search.candidate import with_schedule_shares
from tvm_split.placement.search.simple_plans import FirstFit

MachineKinds = Literal["equal", "three kinds", "unlike"]
LinkKinds = Literal["alike", "two racks", "four sites", "a third slow"]
Networks = Literal["chain", "residual", "unet", "branches"]

GIGABIT = 1.25e8
SPEEDS_OF_KINDS = (1.0, 0.45, 0.15)
OPERATORS = 3
"""Number of kinds of pieces; each class of machines is faster at some kinds."""


def many_machines_problem(
    machines: int,
    pieces: int,
    *,
    kinds: MachineKinds = "unlike",
    links: LinkKinds = "alike",
    network: Networks = "chain",
    replicas: bool = False,
    seed: int = 0,
) -> Problem:
    """A throughput problem: speeds differ by a factor of up to ten; pieces take 2 to 20 ms on the fastest machine."""
    generator = random.Random(f"{seed} machines")
    names = [f"machine-{index}" for index in range(machines)]
    slowness = [_slowness(generator, kinds) for _ in names]
    return Problem(
        objective="throughput",
        machines=tuple(ProblemMachine(name, 16e9) for name in names),
        links=_links(names, links, seed),
        pieces=_pieces(names, slowness, pieces, seed),
        edges=_edges(network, pieces, seed),
        replicas=replicas,
        buffers=3,
    )


def _slowness(generator: random.Random, kinds: MachineKinds) -> list[float]:
    """The slowness of a machine for each kind of piece."""
    kind, exponent, factors = (
        generator.randrange(3),
        generator.uniform(0, 1),
        [generator.uniform(0.9, 1.1) for _ in "abc"],
    )
    if kinds == "equal":
        return [1.0] * OPERATORS
    if kinds == "three kinds":
        better = random.Random(f"kind {kind}")
        return [better.uniform(0.8, 1.2) / SPEEDS_OF_KINDS[kind] for _ in range(OPERATORS)]
    return [factor * 10**exponent for factor in factors]


def _pieces(names: Sequence[str], slowness: Sequence[Sequence[float]], count: int, seed: int) -> tuple[Piece, ...]:
    generator = random.Random(f"{seed} pieces")
    pieces = []
    for index in range(count):
        base, operator = 0.002 * 10 ** generator.uniform(0, 1), generator.randrange(OPERATORS)
        seconds = {name: base * factors[operator] for name, factors in zip(names, slowness, strict=True)}
        pieces.append(Piece(f"p{index}", seconds, generator.uniform(0, 8e6), generator.uniform(0, 4e6)))
    return tuple(pieces)


def _links(names: Sequence[str], links: LinkKinds, seed: int) -> tuple[ProblemLink, ...]:
    def of(source: int, end: int) -> tuple[float, float]:
        if links == "two racks":
            return (10 * GIGABIT, 5e-5) if source % 2 == end % 2 else (GIGABIT, 2e-4)
        if links == "four sites":
            return (10 * GIGABIT, 5e-5) if source % 4 == end % 4 else (GIGABIT / 10, 0.01)
        if links == "a third slow" and hash((seed, min(source, end), max(source, end))) % 3 == 0:
            return GIGABIT / 10, 1e-3
        return GIGABIT, 2e-4

    between = itertools.permutations(range(len(names)), 2)
    return (
        *(ProblemLink(names[source], names[end], *of(source, end)) for source, end in between),
        *(ProblemLink("client", name, GIGABIT, 2e-4) for name in names),
        *(ProblemLink(name, "client", GIGABIT, 2e-4) for name in names),
    )


def _edges(network: Networks, pieces: int, seed: int) -> tuple[Edge, ...]:
    generator = random.Random(f"{seed} edges")
    sizes = [10 ** generator.uniform(4, 5.6) for _ in range(pieces)]
    pairs: Iterable[tuple[int, int]] = itertools.pairwise(range(pieces))
    if network == "residual":  # skips every second and third piece
        pairs = [*pairs, *((index, index + 3) for index in range(0, pieces - 3, 3))]
    elif network == "unet":  # from the encoder to the same level of the decoder
        pairs = [*pairs, *((index, pieces - 1 - index) for index in range(0, pieces // 2 - 1, 8))]
    elif network == "branches":  # four branches of five pieces between a fork and a join
        pairs = [pair for start in range(0, pieces, 22) for pair in _branches(start, pieces)]
    edges = [Edge(f"p{source}", f"p{end}", sizes[source], "out") for source, end in pairs]
    return (Edge("client", "p0", 3e5), *edges, Edge(f"p{pieces - 1}", "client", 4e3))


def _branches(start: int, pieces: int) -> Iterable[tuple[int, int]]:
    join = start + 21
    if join >= pieces:
        return itertools.pairwise(range(start, pieces))
    runs = [range(start + 1 + 5 * branch, start + 6 + 5 * branch) for branch in range(4)]
    inside = [pair for run in runs for pair in [(start, run[0]), *itertools.pairwise(run), (run[-1], join)]]
    return [*inside, (join, join + 1)] if join + 1 < pieces else inside


def first_fit(problem: Problem) -> tuple[Stage, ...] | None:
    """The plan of first fit, or of one machine if that is better."""
    try:
        return FirstFit().solve(problem, 0.0).stages
    except PlanError:
        return None


def dealt_to_all(problem: Problem) -> tuple[Stage, ...]:
    """The whole network on every machine, as replicas with round-robin shares by their speeds."""
    rates = [1.0 / math.fsum(piece.seconds[machine.name] for piece in problem.pieces) for machine in problem.machines]
    shares = tuple(rate / math.fsum(rates) for rate in rates)
    names, pieces = tuple(machine.name for machine in problem.machines), tuple(piece.name for piece in problem.pieces)
    return with_schedule_shares([Stage(names, pieces, shares)])
