"""Random problems: machines and links that differ by up to 100 times, missing links and times, little memory, pins."""

import math
import random
from dataclasses import replace

from tvm_split.cluster.machine import SharedCores
from tvm_split.placement.problem import Edge, Piece, Pin, Problem, ProblemLink, ProblemMachine, Stage

GOOD = """\
{"objective": "throughput", "replicas": false,
 "machines": [{"name": "machine-0", "memory_bytes": 4e9},
              {"name": "machine-1"}],
 "links":    [{"from": "machine-0", "to": "machine-1", "bytes_per_second": 1.25e8, "latency_seconds": 0.001}],
 "pieces":   [{"name": "layer-0", "seconds": {"machine-0": 0.01, "machine-1": 0.02}, "weight_bytes": 4000},
              {"name": "layer-1", "seconds": {"machine-0": 0.01, "machine-1": 0.015}, "weight_bytes": 4000}],
 "edges":    [{"from": "layer-0", "to": "layer-1", "bytes": 4000}]}
"""
"""The content of a problem file: a chain of two pieces on two machines."""


def random_problem(
    seed: int,
    *,
    pieces: int,
    machines: int,
    chain: bool = True,
    replicas: bool = False,
    plain: bool = False,
    shared_cores: bool = False,
    **settings: object,
) -> Problem:
    """A random problem from a seed; ``plain`` leaves out everything that can make it infeasible."""
    generator = random.Random(seed)
    names = [f"machine-{index}" for index in range(machines)]
    slowness = {name: 10 ** generator.uniform(-1, 1) for name in names}
    if generator.random() < 0.3:  # some identical machines, to form device classes
        slowness = dict.fromkeys(names, 1.0)
    alike = generator.random() < 0.3
    limited = not plain and generator.random() < 0.4
    costly = generator.random() < 0.4
    nodes = []
    for index in range(pieces):
        base = generator.choice([0.0, generator.uniform(0.001, 0.1), generator.uniform(0.001, 0.1)])
        seconds = {
            name: base * slowness[name] * (1.0 if alike else generator.uniform(0.5, 2.0))
            for name in names
            if plain or generator.random() > 0.05
        }
        nodes.append(Piece(f"layer-{index}", seconds, generator.uniform(0, 10), generator.uniform(0, 5)))
    total = sum(node.weight_bytes for node in nodes)
    uniform = generator.random() < 0.3
    problem = Problem(
        objective=generator.choice(["throughput", "latency"]),
        machines=tuple(
            ProblemMachine(
                name,
                generator.uniform(0.3, 1.5) * total + 5 if limited else math.inf,
                generator.choice([0.0, 0.001]) if costly else 0.0,
                generator.choice([0.0, 1e-5]) if costly else 0.0,
                generator.choice([1.0, 1.3]) if costly else 1.0,
            )
            for name in names
        ),
        links=tuple(
            ProblemLink(
                source,
                end,
                1e4 if uniform else 10 ** generator.uniform(3, 6),
                0.001 if uniform else generator.choice([0.0, generator.uniform(0, 0.02)]),
            )
            for source in [*names, "client"]
            for end in [*names, "client"]
            if source != end and (plain or generator.random() > 0.1)
        ),
        pieces=tuple(nodes),
        edges=_edges(generator, pieces, chain),
        replicas=replicas,
        buffers=generator.choice([0, 0, 2]),
    )
    if plain:
        return replace(problem, **(_cores(generator, problem) if shared_cores else {}) | settings)  # type: ignore[arg-type]
    pins = tuple(
        _pin(f"layer-{generator.randrange(pieces)}", generator.choice(names), generator.random() < 0.6)
        for _ in range(generator.choice([0, 0, 0, 1, 2]))
    )
    choices: dict[str, object] = {"pins": pins}
    if shared_cores:
        choices |= _cores(generator, problem)
    if generator.random() < 0.15:
        choices["maximum_machines"] = generator.randint(1, machines)
    if generator.random() < 0.15:
        choices["stages"] = generator.randint(1, min(pieces, machines, int(choices.get("maximum_machines", machines))))
    if generator.random() < 0.2:
        choices["maximum_latency_seconds"] = generator.uniform(0.05, 0.5)
    if generator.random() < 0.2:
        choices["maximum_period_seconds"] = generator.uniform(0.02, 0.3)
    return replace(problem, **choices | settings)  # type: ignore[arg-type]


def on_one_host(workers: int, pieces: int, cores: int, **settings: object) -> Problem:
    """Workers and a client on one host, and pieces of 10 ms; links take almost no time."""
    names = [f"worker-{index}" for index in range(workers)]
    ends = [*names, "client"]
    problem = Problem(
        "throughput",
        tuple(ProblemMachine(name) for name in names),
        tuple(ProblemLink(a, b, 1e12) for a in ends for b in ends if a != b),
        tuple(Piece(f"layer-{index}", dict.fromkeys(names, 0.01)) for index in range(pieces)),
        (
            Edge("client", "layer-0", 8.0),
            *(Edge(f"layer-{index}", f"layer-{index + 1}", 8.0) for index in range(pieces - 1)),
            Edge(f"layer-{pieces - 1}", "client", 8.0),
        ),
        shared_cores=(SharedCores(tuple(ends), cores),),
    )
    return replace(problem, **settings)  # type: ignore[arg-type]


def one_each(problem: Problem) -> list[Stage]:
    return [
        Stage((machine.name,), (piece.name,)) for machine, piece in zip(problem.machines, problem.pieces, strict=True)
    ]


def _cores(generator: random.Random, problem: Problem) -> dict[str, object]:
    """One or two sets of machines, and the client, that share a few cores; a machine may be a GPU."""
    machines = [replace(machine, cores=generator.choice([0, 1, 1, 2])) for machine in problem.machines]
    names = [*(machine.name for machine in machines), "client"]
    sets = [
        SharedCores(tuple(generator.sample(names, generator.randint(1, len(names)))), generator.randint(1, 3))
        for _ in range(generator.choice([1, 1, 2]))
    ]
    return {
        "machines": tuple(machines),
        "shared_cores": tuple(sets),
        "client_transfer_seconds": generator.choice([0.0, 0.002]),
        "client_transfer_seconds_per_byte": generator.choice([0.0, 1e-5]),
    }


def _edges(generator: random.Random, pieces: int, chain: bool) -> tuple[Edge, ...]:
    def size() -> float:
        return generator.choice([0.0, generator.uniform(1, 1000), generator.uniform(1, 1000)])

    edges = [Edge(f"layer-{index}", f"layer-{index + 1}", size()) for index in range(pieces - 1)]
    if not chain:
        edges = [edge for edge in edges if generator.random() > 0.25]
        for index in range(pieces):
            later = [target for target in range(index + 2, pieces) if generator.random() < 0.2]
            if len(later) > 1 and generator.random() < 0.6:
                shared = size()
                edges += [Edge(f"layer-{index}", f"layer-{target}", shared, "out") for target in later]
            else:
                edges += [Edge(f"layer-{index}", f"layer-{target}", size()) for target in later]
    if generator.random() < 0.4:
        edges.insert(0, Edge("client", "layer-0", size()))
    if generator.random() < 0.4:
        edges.append(Edge(f"layer-{pieces - 1}", "client", size()))
    if not chain and generator.random() < 0.2:
        edges.append(Edge(f"layer-{generator.randrange(pieces)}", "client", size()))
    return tuple(edges)


def _pin(piece: str, machine: str, forbidden: bool) -> Pin:
    return Pin(piece, not_on=machine) if forbidden else Pin(piece, machine)
