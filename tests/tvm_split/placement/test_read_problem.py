import json
import math
import re
from pathlib import Path

import pytest

from tests.helpers.placement.problems import GOOD
from tvm_split.cluster.machine import SharedCores
from tvm_split.errors import PlanError
from tvm_split.placement.problem import Edge, Piece, Pin, Problem, ProblemLink, ProblemMachine
from tvm_split.placement.read_problem import problem_to_dict, read_problem_file, solution_to_dict
from tvm_split.placement.search import solve


def write(folder: Path, text: str) -> Path:
    path = folder / "problem.json"
    path.write_text(text)
    return path


def test_the_plain_format(tmp_path: Path) -> None:
    assert read_problem_file(write(tmp_path, GOOD)) == Problem(
        "throughput",
        (ProblemMachine("machine-0", 4e9), ProblemMachine("machine-1")),
        (ProblemLink("machine-0", "machine-1", 1.25e8, 0.001),),
        (
            Piece("layer-0", {"machine-0": 0.01, "machine-1": 0.02}, 4000),
            Piece("layer-1", {"machine-0": 0.01, "machine-1": 0.015}, 4000),
        ),
        (Edge("layer-0", "layer-1", 4000),),
    )


def test_everything_that_can_be_said_besides(tmp_path: Path) -> None:
    content = json.loads(GOOD)
    content["machines"][0] |= {"transfer_seconds": 1e-4, "transfer_seconds_per_byte": 1e-9, "contention": 1.2}
    content["pieces"][0]["activation_bytes"] = 7
    content["edges"][0]["tensor"] = "out"
    content["pins"] = [{"piece": "layer-0", "on": "machine-0"}, {"piece": "layer-1", "not_on": "machine-0"}]
    content |= {"maximum_machines": 2, "stages": 2, "buffers": 3}
    content |= {"maximum_period_seconds": 1.5, "maximum_latency_seconds": 2}
    content |= {"shared_cores": [{"machines": ["machine-0", "client"], "cores": 2}]}
    content |= {"client_transfer_seconds": 1e-4, "client_transfer_seconds_per_byte": 1e-9}
    problem = read_problem_file(write(tmp_path, json.dumps(content)))
    assert problem.shared_cores == (SharedCores(("machine-0", "client"), 2),)
    assert (problem.client_transfer_seconds, problem.client_transfer_seconds_per_byte) == (1e-4, 1e-9)
    assert read_problem_file(write(tmp_path, json.dumps(problem_to_dict(problem)))) == problem
    assert problem.machines[0] == ProblemMachine("machine-0", 4e9, 1e-4, 1e-9, 1.2)
    assert problem.pieces[0].activation_bytes == 7
    assert problem.edges[0].tensor == "out"
    assert problem.pins == (Pin("layer-0", "machine-0"), Pin("layer-1", not_on="machine-0"))
    assert (problem.maximum_machines, problem.stages, problem.buffers) == (2, 2, 3)
    assert (problem.maximum_period_seconds, problem.maximum_latency_seconds) == (1.5, 2.0)


def test_the_answer(tmp_path: Path) -> None:
    problem = read_problem_file(write(tmp_path, GOOD))
    answer = json.loads(json.dumps(solution_to_dict(problem, solve(problem))))
    assert answer["stages"] == [
        {"machine": "machine-0", "pieces": ["layer-0"]},
        {"machine": "machine-1", "pieces": ["layer-1"]},
    ]
    assert answer["predicted"] == {"period_seconds": 0.015, "latency_seconds": pytest.approx(0.026032)}
    assert answer["lower_bound_seconds"] == 0.015
    assert answer["gap"] == 0.0
    assert answer["limiting"] == "compute of machine-1"
    assert {load["machine"] for load in answer["loads"]} == {"machine-0", "machine-1"}
    assert all(alternative["why"] for alternative in answer["alternatives"])
    assert all(math.isfinite(load["memory_bytes"]) for load in answer["loads"])


def test_replicas_name_all_machines_and_shares(tmp_path: Path) -> None:
    text = GOOD.replace('"replicas": false', '"replicas": true').replace("0.02", "0.01").replace("0.015", "1")
    both_ways = text.replace(
        '"latency_seconds": 0.001}',
        '"latency_seconds": 0.001}, {"from": "machine-1", "to": "machine-0", "bytes_per_second": 1}',
    )
    problem = read_problem_file(write(tmp_path, both_ways.replace('"bytes": 4000', '"bytes": 0')))
    stage = solution_to_dict(problem, solve(problem))["stages"][0]
    assert set(stage) == {"machine", "machines", "pieces", "shares"}
    assert sum(stage["shares"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ('{"name": "machine-1"}', '{"name": "machine-0"}', 3, "two machines are named 'machine-0'"),
        ('{"name": "machine-1"}', '{"name": "client"}', 3, "cannot be named 'client'"),
        ("1.25e8", "0", 4, "links.0.bytes_per_second: must be greater than or equal to"),
        ('"to": "machine-1"', '"to": "machine-9"', 4, "'machine-9'; there are machine-0, machine-1"),
        ("0.015", "-1", 6, "pieces.1.seconds.machine-1: must be greater than or equal to 0"),
        ('"to": "layer-1"', '"to": "layer-9"', 7, "edges.0.to: no piece is named 'layer-9'"),
        ('"bytes": 4000}]', '"bytes": 4000}], "pins": [{"piece": "layer-0"}]', 7, 'either "on" or "not_on"'),
        (
            '"bytes": 4000}]',
            '"bytes": 4000}], "shared_cores": [{"machines": ["machine-5"], "cores": 1}]',
            7,
            "shared_cores.0.machines.0: no machine is named 'machine-5'",
        ),
        ('"bytes": 4000}]', '"bytes": 4000}], "stages": 3', 7, "3 stages were asked for, but there are 2 machines"),
        ('"machine-1": 0.02', '"machine-1": 1e-308', 5, "it must be 0, or at least 1e-30"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, right: str, wrong: str, line: int, message: str) -> None:
    assert right in GOOD
    path = write(tmp_path, GOOD.replace(right, wrong))
    with pytest.raises(PlanError) as caught:
        read_problem_file(path)
    assert f"{path}:{line}: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('{"name": "machine-1"}', '{"name": "machine-x"}', "no machine is named 'machine-1'"),
        ('{"name": "machine-1"}', '{"nam": "machine-1"}', "did you mean 'name'?"),
        ('"name": "layer-0"', '"name": ""', "a piece has no name"),
        ('"pieces"', '"layers"', "layers: there is no such key; did you mean 'pieces'?"),
        ('"from": "machine-0", "to": "machine-1"', '"from": "x", "to": "x"', "no machine is named 'x'"),
        ('"replicas": false', '"stages": 9, "maximum_machines": 1', "but at most 1 machines may be used"),
    ],
)
def test_of_what_is_wrong_only_the_cause_is_named(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_problem_file(write(tmp_path, GOOD.replace(right, wrong)))
    (line,) = str(caught.value).splitlines()
    assert message in line


def test_what_is_null_is_not_given(tmp_path: Path) -> None:
    text = GOOD.replace('"weight_bytes": 4000', '"weight_bytes": null')
    assert [piece.weight_bytes for piece in read_problem_file(write(tmp_path, text)).pieces] == [0.0, 0.0]


def test_the_example_of_the_documentation_is_solved(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    solution = solve(read_problem_file(write(tmp_path, re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])))
    assert solution.evaluation.period_seconds == solution.lower_bound_seconds == 0.02
