"""Profiles of small chains written by hand, and the problems that follow from them."""

import itertools
import math
from collections.abc import Mapping, Sequence

from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.layer_graphs import chain_graph
from tvm_split.placement.graph import LayerGraph, piece_edges
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.prediction import Coded, Prediction, predict
from tvm_split.placement.problem import Objective, Problem, Stage
from tvm_split.placement.profile import (
    ClusterProfile,
    LinkProfile,
    MachineProfile,
    ModelPiece,
    PieceTime,
    StreamingCost,
)
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.search import solve
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.planning.choose import beside
from tvm_split.planning.problem_from_profile import in_layers, model_problem, stages_of_layers

A, B, C = "machine-a", "machine-b", "machine-c"


def chain_profile(
    seconds: Mapping[str, Sequence[float]],
    *,
    contention: float = 1.0,
    hostname: str | None = None,
    bytes_per_second: float = 1e9,
    latency_seconds: float = 1e-4,
    weight_bytes: int = 100,
    measured_at: float = 1000.0,
) -> ClusterProfile:
    """Pieces ``layer_0``, … with these seconds by machine, all measured; each machine has its own host, or all one."""
    count = len(next(iter(seconds.values())))
    names = [f"layer_{index}" for index in range(count)]
    return ClusterProfile(
        model="net",
        model_digest="",
        pieces=tuple(ModelPiece(name, (name,), weight_bytes, 10) for name in names),
        machines=tuple(
            MachineProfile(
                machine=machine,
                target={"kind": "llvm"},
                threads=1,
                hostname=hostname or machine,
                memory_free_bytes=math.inf,
                operations_per_second=1e9,
                bytes_per_second=1e9,
                streaming=StreamingCost(),
                pieces={
                    name: PieceTime(duration, duration * contention, "measured")
                    for name, duration in zip(names, times, strict=True)
                },
                measured_at=measured_at,
            )
            for machine, times in seconds.items()
        ),
        links=tuple(
            LinkProfile(source, end, bytes_per_second, latency_seconds, "measured", measured_at + 1)
            for source, end in itertools.permutations((CLIENT, *seconds), 2)
        ),
    )


def graph_of(profile: ClusterProfile) -> LayerGraph:
    return chain_graph([layer for piece in profile.pieces for layer in piece.layers])


def chain_problem(
    profile: ClusterProfile,
    objective: Objective = "throughput",
    memory: Mapping[str, int | None] | None = None,
    **constraints: object,
) -> Problem:
    edges = piece_edges(graph_of(profile), [piece.layers for piece in profile.pieces])
    return model_problem(profile, edges, memory or {}, PlanRequest(objective, **constraints))  # type: ignore[arg-type]


def predicted(
    problem: Problem,
    profile: ClusterProfile,
    stages: tuple[Stage, ...] | None = None,
    coded: Coded | None = None,
    best: Solution | None = None,
) -> Prediction:
    """The prediction of the best solution, or of stages of pieces beside it."""
    best = best or solve(problem)
    solution = best if stages is None else beside(solution_of(problem, stages), best, "plan by hand")
    return predict(problem, in_layers(graph_of(profile), profile, problem, solution), profile, coded)


def planned(profile: ClusterProfile, piece_stages: tuple[Stage, ...] | None = None, **settings: object) -> Plan:
    """A plan with its prediction: the best one, or that of ``piece_stages``."""
    problem = chain_problem(profile, **settings)  # type: ignore[arg-type]
    best = solve(problem)
    prediction = predicted(problem, profile, piece_stages, best=best)
    machines = tuple(PlannedMachine(machine.machine, {"kind": "llvm"}, 1) for machine in profile.machines)
    named = stages_of_layers(graph_of(profile), profile, piece_stages or best.stages)
    return Plan("net", "throughput", "test", machines, named, prediction)
