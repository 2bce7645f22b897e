"""`tvm-split simulate` and `solve`: plans and problems from files, slow and lost machines, and pictures."""

import json

import pytest

from tests.helpers.placement.bench_reports import report_of
from tests.helpers.placement.problems import GOOD
from tests.helpers.placement.profiles import A, B, chain_profile, planned


@pytest.fixture
def plan_path(tmp_path):
    path = tmp_path / "plan.json"
    planned(chain_profile({A: [0.02, 0.01], B: [0.02, 0.01]}), stages=2).save(path)
    return path


@pytest.fixture
def problem_path(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(GOOD)
    return path


@pytest.fixture
def solved(tmp_path, invoke, problem_path):
    """Write a problem and its solution."""
    answer = tmp_path / "answer.json"
    answer.write_text(invoke("solve", problem_path, "--json").stdout)
    return problem_path, answer


def test_a_plan_is_told_beside_its_prediction(invoke, plan_path):
    text = invoke("simulate", plan_path, "--timeline").stdout
    for words in ("net, simulated: 300 results", A, "Latency alone: 3", "compute"):
        assert words in text, text
    assert "micro-batches/s 50 50 1.00" in " ".join(text.split())
    # No row continues on another line.
    assert all("compute" in line for line in text.splitlines() if "··" in line), text


def test_as_json(invoke, plan_path):
    simulated = json.loads(invoke("simulate", plan_path, "--json", "--micro-batches", "50", "--scatter", "0.2").stdout)
    assert simulated["results"] == 50
    assert simulated["micro_batches_per_second"] == pytest.approx(1 / simulated["period_seconds"])
    assert simulated["predicted"]["period_seconds"] == pytest.approx(0.02, rel=0.01)
    assert {machine["machine"] for machine in simulated["machines"]} == {A, B}
    assert simulated["single"]["percentiles_seconds"]["90"] > simulated["single"]["percentiles_seconds"]["50"]
    assert simulated["what_if"]["compute_scatter"] == 0.2
    slow = json.loads(invoke("simulate", plan_path, "--slow", f"{A}=4", "--json").stdout)
    assert slow["period_seconds"] > 0.039


def test_what_was_measured_of_machines_counts(invoke, plan_path, tmp_path):
    report = report_of(json.loads(plan_path.read_text()), {A: 2.5})
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    simulated = json.loads(invoke("simulate", plan_path, "--measured", path, "--json").stdout)
    assert simulated["period_seconds"] == pytest.approx(0.05, rel=1e-6)
    path.write_text(json.dumps({**report, "model": "other"}))
    assert "is of model 'other'" in invoke("simulate", plan_path, "--measured", path, code=2).stderr


def test_a_problem_and_its_answer(invoke, solved):
    problem, answer = solved
    simulated = json.loads(invoke("simulate", answer, "--problem", problem, "--json").stdout)
    assert simulated["period_seconds"] == pytest.approx(0.015, rel=1e-6)
    assert simulated["predicted"]["period_seconds"] == 0.015


def test_a_machine_is_lost(invoke, plan_path):
    result = invoke("simulate", plan_path, "--lose", f"{B}@1", code=1)
    assert f"{B} is lost at 1 s\n" in result.stdout
    assert (
        "49 results came, the last at 990 ms; 7 micro-batches never come out, since no other machine takes over"
        in result.stdout
    )
    at_once = invoke("simulate", plan_path, "--lose", f"{A}@0", code=1).stdout
    assert "No result came; " in at_once


def test_too_few_results_of_replicas_are_no_rate(invoke, tmp_path):
    """JSON has valid numbers, the text says what to request; two equal replicas give their first results at once."""
    problem, answer = tmp_path / "problem.json", tmp_path / "answer.json"
    machines, seconds = [{"name": "a"}, {"name": "b"}], {"a": 0.01, "b": 0.01}
    content = {"objective": "throughput", "replicas": True, "machines": machines, "links": [], "edges": []}
    problem.write_text(json.dumps({**content, "pieces": [{"name": "p", "seconds": seconds}]}))
    answer.write_text(invoke("solve", problem, "--json").stdout)
    arguments = ["simulate", answer, "--problem", problem, "--micro-batches", "2"]

    def refused(constant):
        raise AssertionError(constant)

    simulated = json.loads(invoke(*arguments, "--json").stdout, parse_constant=refused)
    assert (simulated["results"], simulated["period_seconds"], simulated["micro_batches_per_second"]) == (2, None, None)
    assert "replicas repeats after 2 results: a throughput needs --micro-batches 4" in " ".join(
        invoke(*arguments).stdout.split()
    )


def test_a_picture(invoke, plan_path, tmp_path):
    invoke("simulate", plan_path, "--trace", tmp_path / "work.svg")
    assert "<svg" in (tmp_path / "work.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slow", "box"], "'box' is not MACHINE=FACTOR[@SECONDS], like box=2"),
        (["--slow", "a=b@c=2@1"], "the plan does not use a machine named 'a=b@c'"),
        (["--slow", f"{A}=0"], "0.0 times as long"),
        (["--slow", f"{A}=2", "--slow", f"{A}=3@1"], f"machine '{A}' is to be slowed 2 times"),
        (["--lose", "box"], "'box' is not MACHINE@SECONDS"),
        (["--lose", "lamp@2"], f"the plan does not use a machine named 'lamp'; it uses {A}"),
        (["--lose", f"{A}@2", "--lose", f"{A}@1"], f"machine '{A}' is to be lost 2 times"),
        (["--micro-batches", "1"], "--micro-batches"),
        (["--scatter", "-1"], "--scatter"),
        (["--trace", "work.tiff"], "'work.tiff' has none of the suffixes of a trace"),
    ],
)
def test_wrong_use_is_named(invoke, plan_path, arguments, message):
    text = " ".join(invoke("simulate", plan_path, *arguments, code=2).stderr.split())
    assert message in text, text


def test_files_that_are_no_plan_and_no_answer(invoke, plan_path, solved):
    problem, answer = solved
    assert "plan" in invoke("simulate", problem, code=2).stderr
    assert f"{plan_path} is a plan, and no" in invoke("simulate", answer, "--problem", plan_path, code=2).stderr
    assert f"{answer} is an answer of `tvm" in invoke("simulate", plan_path, "--problem", answer, code=2).stderr
    assert f"{plan_path} is a plan, and no answer" in invoke("simulate", plan_path, "--problem", problem, code=2).stderr
    assert "takes an answer of `tvm-split solve` with its --problem" in invoke("simulate", answer, code=2).stderr
    both = invoke("simulate", answer, "--problem", problem, "--measured", plan_path, code=2)
    assert "--measured" in both.stderr


def test_a_problem_as_a_table(invoke, problem_path):
    text = " ".join(invoke("solve", problem_path).stdout.split())
    for expected in (
        "machine-0",
        "period, ms 15 latency",
        "Limited by compute of machine-1",
        "no plan has a period below 15 ms",
        "instead",
    ):
        assert expected in text


def test_a_problem_without_a_plan_fails_with_the_reason(invoke, problem_path):
    problem_path.write_text(
        GOOD.replace('"name": "machine-1"', '"name": "machine-1", "memory_bytes": 1').replace("4e9", "5000")
    )
    result = invoke("solve", problem_path, code=1)
    assert "no plan fits the memory" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [("0.015", "-1", ":6: "), ("]}\n", ', {"from": "layer-1", "to": "layer-0", "bytes": 1}]}\n', "cycle")],
)
def test_a_wrong_file_is_wrong_use_and_named(invoke, problem_path, right, wrong, words):
    problem_path.write_text(GOOD.replace(right, wrong))
    assert words in invoke("solve", problem_path, code=2).stderr.partition(str(problem_path))[2]
