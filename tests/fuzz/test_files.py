"""Any content of a file that people edit or pass on is accepted, or rejected with a message, within seconds."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

import tvm_split
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.routes import CLIENT
from tests.helpers.mutations import changed
from tests.helpers.placement.problems import GOOD, random_problem
from tests.helpers.placement.profiles import A, B, C, chain_problem, chain_profile, planned
from tests.helpers.placement.steps import step
from tests.helpers.scenarios import scenario_of_problem
from tests.helpers.trials import Trials
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.bundle import Bundle
from tvm_split.deployment.deployment_report import DeploymentReport, read_computing, read_measured
from tvm_split.deployment.report_values import Comparison, LinkReport, MachineReport
from tvm_split.display.plan import plan_parts
from tvm_split.display.view import print_parts
from tvm_split.placement.corrections import calibrated, corrections_of
from tvm_split.placement.plan import Plan
from tvm_split.placement.prediction import predict
from tvm_split.placement.problem import Problem, Sharding, Stage
from tvm_split.placement.profile import Corrections
from tvm_split.placement.read_problem import problem_to_dict, read_problem_file, read_solution_file, solution_to_dict
from tvm_split.placement.search import solve
from tvm_split.placement.solution import solution_of
from tvm_split.placement.step_graph import StepGraph, Transfer
from tvm_split.simulation.scenario import scenario_of_plan, with_measured_compute
from tvm_split.simulation.simulate import simulate

PROFILE = chain_profile({A: [0.02, 0.01, 0.03], B: [0.02, 0.01, 0.03], C: [0.04, 0.01, 0.02]})
SECONDS = 0.2
"""Time limit of each search in seconds."""


def shared_plan() -> Plan:
    """Return a plan in which two machines compute one stage together, with one exchange."""
    plan = planned(PROFILE, stages=2)
    parts = StepGraph(
        (step("a0", A, 2.0), step("b0", B, 3.0), step("a1", A, 1.0)),
        (
            Transfer("x_a", CLIENT, ("a0",), 50.0),
            Transfer("x_b", CLIENT, ("b0",), 50.0),
            Transfer("half_b", "b0", ("a1",), 100.0),
            Transfer("half_a", "a0", ("a1",), 100.0),
            Transfer("y", "a1", (), 50.0),
        ),
    )
    problem = chain_problem(PROFILE, "latency")
    prediction = predict(problem, solution_of(problem, (), graph=parts), PROFILE)
    layers = tuple(layer for stage in plan.stages for layer in stage.layers)
    stage = Stage((A, B), layers, (0.5, 0.5), "stage", Sharding("rows", "each"))
    return dataclasses.replace(plan, stages=(stage,), prediction=prediction)


def plans() -> list[Any]:
    corrected = planned(PROFILE, stages=3)
    assert corrected.prediction is not None
    corrections = Corrections(((A, 1.5),), ((A, B, 1e6),))
    corrected = dataclasses.replace(
        corrected, prediction=dataclasses.replace(corrected.prediction, corrections=corrections)
    )
    names = {A: 0.67, B: 0.33}
    replicas = Stage(tuple(names), tuple(f"layer_{index}" for index in range(3)), tuple(names.values()), "stage_0")
    return [plan.to_dict() for plan in (corrected, planned(PROFILE, (replicas,)), shared_plan())]


def problems() -> list[Any]:
    settings: dict[str, Any] = {"pieces": 4, "machines": 3, "plain": True, "shared_cores": True}
    shared = [random_problem(seed, chain=seed > 1, replicas=seed > 0, **settings) for seed in range(3)]
    pinned = json.loads(GOOD) | {"stages": 2, "pins": [{"piece": "layer-0", "on": "machine-0"}]}
    pinned["links"].append({"from": "machine-1", "to": "client", "bytes_per_second": 1e6})
    return [pinned, *map(problem_to_dict, shared)]


def report() -> Any:
    machines = tuple(
        MachineReport(
            name, (stage,), (1.0,), 10, Comparison(0.02, 0.05, 0.01), Comparison(1e-6, 1e-6), Comparison(0, 0)
        )
        for name, stage in ((A, "stage_0"), (B, "stage_1"), (C, "stage_2"))
    )
    links = (LinkReport(A, B, Comparison(1e5, 1e5), Comparison(1e-4, 2e-4)),)
    whole = Comparison(0.02, 0.05), Comparison(0.03, 0.06)
    deployment_report = DeploymentReport("net", "", "", *whole, machines, links, runs=1, streamed=10, advice=())
    return dataclasses.replace(deployment_report, corrections=Corrections(((A, 1.5),), ((A, B, 1e6),))).to_dict()


CLUSTER = """\
machines:
  - {name: desk, address: "192.0.2.10:7001", threads: 8, memory_bytes: 16.0e+9, target: {kind: llvm}}
  - {name: box, address: "192.0.2.11:7001"}
  - {name: edge, address: "192.0.2.12:7001", ssh: {to: me@edge, arguments: [--insecure]}}
groups: {lab: [desk, box], campus: [lab, edge]}
links:
  - {from: campus, to: campus, bytes_per_second: 1.0e+6, latency_seconds: 0.001}
  - {from: lab, to: lab}
  - {from: box, to: edge, bytes_per_second: 0}
  - {from: client, to: campus, bytes_per_second: 3.0e+6, codec: auto}
shared_cores:
  - {machines: [lab, client], cores: 4}
"""


def use_plan(path: Path) -> None:
    plan = Plan.load(path)
    plan.to_dict()
    for details in (False, True):
        print_parts(plan_parts(plan, [0.5] * len(plan.stages), details=details), Console(width=120))
    simulate(scenario_of_plan(plan), micro_batches=3, in_flight=plan.in_flight)


def use_problem(path: Path) -> None:
    problem = read_problem_file(path)
    json.dumps(problem_to_dict(problem), allow_nan=False)
    solution = solve(problem, time_limit_seconds=SECONDS)
    json.dumps(solution_to_dict(problem, solution))
    assert math.isfinite(solution.evaluation.period_seconds)
    simulate(scenario_of_problem(problem, solution.stages), micro_batches=3)


def answered() -> tuple[Problem, Any]:
    problem = random_problem(3, pieces=4, machines=3, plain=True, objective="throughput", replicas=True)
    return problem, solution_to_dict(problem, solve(problem, time_limit_seconds=SECONDS))


def use_answer(path: Path) -> None:
    simulate(scenario_of_problem(answered()[0], read_solution_file(path)), micro_batches=3)


def use_report(path: Path) -> None:
    scenario = scenario_of_plan(planned(PROFILE, stages=3))
    simulate(with_measured_compute(scenario, read_computing(path, "net")), micro_batches=3)
    profile = calibrated(PROFILE, corrections_of(read_measured(path, "net")))
    solve(chain_problem(profile), time_limit_seconds=SECONDS)


def use_cluster(path: Path) -> None:
    cluster = Cluster.from_yaml(path)
    for machine in cluster.machine_names:
        cluster.link(machine, CLIENT)


@cache
def bundle() -> Bundle:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    model = tvm_split.load_model(network, (torch.randn(1, 4),))
    cluster, split = Cluster.in_process(2, threads=1), {"machine-a": ["0", "1"], "machine-b": ["2"]}
    return tvm_split.compile(model, tvm_split.plan(model, cluster, split=split))


def manifest() -> Any:
    with TemporaryDirectory() as folder:
        bundle().save(Path(folder) / "bundle")
        return json.loads((Path(folder) / "bundle/manifest.json").read_bytes())


def use_manifest(path: Path) -> None:
    """Load and save a bundle with this manifest; neither touches anything outside of the bundle's folder."""
    with TemporaryDirectory() as root:
        folder, content = Path(root) / "here" / "bundle", path.read_bytes()
        bundle().save(folder)
        (folder / "manifest.json").write_bytes(content)
        (folder / "manifest.sha256").write_text(hashlib.sha256(content).hexdigest())
        try:
            Bundle.load(folder).save(folder.parent / "saved")
        finally:
            assert {place.name for place in folder.parent.iterdir()} <= {"bundle", "saved"}
            assert [place.name for place in Path(root).iterdir()] == ["here"]


KINDS: dict[str, tuple[Callable[[], list[Any]], Callable[[Path], None]]] = {
    "plan": (plans, use_plan),
    "problem": (problems, use_problem),
    "answer": (lambda: [answered()[1]], use_answer),
    "report": (lambda: [report()], use_report),
    "cluster": (lambda: [yaml.safe_load(CLUSTER)], use_cluster),
    "manifest": (lambda: [manifest()], use_manifest),
}


@pytest.mark.parametrize("kind", KINDS)
def test_edited_files(kind: str, tmp_path: Path, trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    make, use = KINDS[kind]
    right, path = [json.dumps(document) for document in make()], tmp_path / "file"
    unforeseen: dict[str, str] = {}
    for text in right:
        path.write_text(text)
        use(path)
    for _ in trials:
        content = changed(json.loads(trials.source.choice(right)), trials.source)
        path.write_bytes(content)
        try:
            use(path)
            trials.found["taken"] += 1
        except TvmSplitError:
            trials.found["refused"] += 1
        except Exception as error:
            trials.found[type(error).__name__] += 1
            unforeseen.setdefault(f"{type(error).__name__}: {str(error)[:200]}", content.decode(errors="replace"))
        capsys.readouterr()
    assert not unforeseen
