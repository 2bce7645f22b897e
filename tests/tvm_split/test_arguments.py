"""What users write first either works, or is refused with a sentence that says what to write."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import tvm_split
from tests.models.small_onnx_model import INPUT_SHAPE, small_model
from tvm_split import values
from tvm_split.placement.corrections import Measured
from tvm_split.placement.problem import Problem
from tvm_split.placement.read_problem import problem_to_dict

X = torch.ones(1, 4)
A, B = "machine-a", "machine-b"


class Adding(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def network() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))).eval()


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    return tvm_split.load_model(network(), (X,))


@pytest.fixture(scope="module")
def bundle(model: tvm_split.Model) -> tvm_split.Bundle:
    return tvm_split.compile(model, tvm_split.plan(model, "in-process:2", stages=2, estimate=True), verify=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bundle: tvm_split.Bundle) -> Path:
    """A folder with an ONNX file, a cluster file, a plan and a bundle."""
    path = tmp_path_factory.mktemp("files")
    onnx.save(small_model(), path / "small.onnx")
    (path / "cluster.yaml").write_text("machines: [{name: box, address: '127.0.0.1:9', target: {kind: llvm}}]")
    bundle.plan.save(path / "plan.json")
    bundle.save(path / "bundle")
    return path


@pytest.mark.parametrize(
    "split",
    [
        [["0"], ["3"]],
        [[0], [3]],
        {A: [0], B: [3]},
        {A: "0", B: "3"},
        {A: range(1), B: {3}},
        {A: ("0", 1, 2), B: ["3"]},
        ["machine-a=0", "machine-b=3"],
    ],
)
def test_splits(model: tvm_split.Model, split: Any) -> None:
    plan = tvm_split.plan(model, tvm_split.Cluster.local(2), split=split)
    assert [(stage.machine, stage.layers) for stage in plan.stages] == [(A, ("0", "1", "2")), (B, ("3",))]


def test_paths_instead_of_what_is_in_them(folder: Path, model: tvm_split.Model) -> None:
    plan = tvm_split.plan(str(folder / "small.onnx"), folder / "cluster.yaml", estimate=True)
    assert plan.machines[0].name == "box"
    assert tvm_split.compile(model, folder / "plan.json", verify=False).plan.stages
    with tvm_split.deploy(folder / "bundle", "in-process:2") as deployment:
        deployment.run(X)
    with tvm_split.compile_and_deploy(folder / "small.onnx", "in-process") as deployment:
        deployment.run(np.zeros(INPUT_SHAPE, np.float32))
    predicted = tvm_split.plan(
        model, "local:2", estimate=True, on_problem=lambda problem: write_problem(folder, problem)
    )
    predicted.save(folder / "predicted.json")
    assert tvm_split.simulate(folder / "predicted.json").results == tvm_split.simulate(predicted).results
    assert tvm_split.solve(str(folder / "problem.json")).stages


def write_problem(folder: Path, problem: Problem) -> None:
    values.write(problem_to_dict(problem), folder / "problem.json")


def test_inputs_by_name() -> None:
    left, right = torch.rand(2, 3), torch.rand(2, 3)
    expected = (left - right).numpy()
    with tvm_split.compile_and_deploy(Adding(), (left, right), "in-process") as deployment:
        calls: list[Callable[[], Any]] = [
            lambda: deployment.run(left, right),
            lambda: deployment.run(right=right, left=left),
            lambda: deployment.run(left, right=right),
            lambda: deployment.run({"right": right, "left": left}),
            lambda: deployment.run((left, right)),
            lambda: deployment.run(left.tolist(), right.numpy()),
            lambda: deployment.submit(right=right, left=left).result(),
            lambda: next(deployment.stream([{"right": right, "left": left}])),
        ]
        for call in calls:
            (difference,) = call()
            np.testing.assert_array_equal(difference, expected)
        assert tvm_split.bench(deployment, {"left": left, "right": right}, rounds=1, micro_batches=3).runs == 5
        for wrong in ({"left": left}, {"left": left, "right": right, "up": right}):
            with pytest.raises(tvm_split.InputError, match="left: float32"):
                deployment.run(wrong)
        with pytest.raises(tvm_split.InputError, match="1 by position and those with the names left"):
            deployment.run(left, left=left)


PLANS: dict[str, Callable[[tvm_split.Model, tvm_split.Cluster], Any]] = {
    "a network": lambda model, cluster: tvm_split.plan(network(), cluster),
    "a class": lambda model, cluster: tvm_split.plan(torch.nn.Linear, cluster),
    "swapped": lambda model, cluster: tvm_split.plan(cluster, model),
    "nothing": lambda model, cluster: tvm_split.plan(None, cluster),
    "a number of machines": lambda model, cluster: tvm_split.plan(model, 2),
    "no such file": lambda model, cluster: tvm_split.plan(model, "nope.yaml"),
    "no such launcher": lambda model, cluster: tvm_split.plan(model, "machines"),
    "a split as objective": lambda model, cluster: tvm_split.plan(model, cluster, {A: ["0"]}),
    "layers without machines": lambda model, cluster: tvm_split.plan(model, cluster, split=["0", "3"]),
    "too many machines": lambda model, cluster: tvm_split.plan(model, cluster, split=[["0"], ["1"], ["2"]]),
    "modules as layers": lambda model, cluster: tvm_split.plan(model, cluster, split={A: [network()[0]]}),
    "stages as text": lambda model, cluster: tvm_split.plan(model, cluster, stages="two"),
    "a wrong name": lambda model, cluster: tvm_split.plan(model, cluster, stage=2),
    "a shard as text": lambda model, cluster: tvm_split.plan(model, cluster, shards="0..1"),
    "a request as dict": lambda model, cluster: tvm_split.plan(model, cluster, request={"stages": 2}),
    "no plan": lambda model, cluster: tvm_split.compile(model, cluster),
    "compile swapped": lambda model, cluster: tvm_split.compile(tvm_split.plan(model, cluster, stages=2), model),
    "sizes of an axis as texts": lambda model, cluster: tvm_split.load_model(network(), (X,), dimensions={"h": "x"}),
    "a size that importers cannot count": lambda model, cluster: tvm_split.load_model(network(), (X,), batch=2**40),
    "a switch as text": lambda model, cluster: tvm_split.compile(
        model, tvm_split.plan(model, cluster), verify="perhaps"
    ),
    "a number as a folder": lambda model, cluster: tvm_split.tune(model, cluster, database=3),
    "a number as a budget": lambda model, cluster: tvm_split.solve("problem.json", budget=3.0),
    "tune nothing": lambda model, cluster: tvm_split.tune(model, 3),
    "an unknown answer to failures": lambda model, cluster: tvm_split.compile_and_deploy(
        network(), (X,), cluster, on_failure="recovr"
    ),
    "deploy a plan": lambda model, cluster: tvm_split.deploy(tvm_split.plan(model, cluster, stages=2), cluster),
    "deploy swapped": lambda model, cluster: tvm_split.deploy(cluster, model),
    "deploy a folder": lambda model, cluster: tvm_split.deploy("nope", cluster),
    "no inputs": lambda model, cluster: tvm_split.compile_and_deploy(network(), cluster),
    "lists of numbers": lambda model, cluster: tvm_split.load_model(network(), ([[1.0] * 4],)),
    "a list that holds itself": lambda model, cluster: tvm_split.load_model(network(), endless()),
    "a list that is 2 ** 40 lists": lambda model, cluster: tvm_split.load_model(network(), doubled(40)),
    "workers as text": lambda model, cluster: tvm_split.Cluster.local("three"),
    "no workers": lambda model, cluster: tvm_split.Cluster.local(0),
    "a file as machines": lambda model, cluster: tvm_split.Cluster("cluster.yaml"),
    "names as machines": lambda model, cluster: tvm_split.Cluster([A, B]),
    "a mapping as a file": lambda model, cluster: tvm_split.Cluster.from_yaml({"machines": []}),
    "a speed as text": lambda model, cluster: tvm_split.Link(A, B, bytes_per_second="1 GB/s"),
    "no latency": lambda model, cluster: tvm_split.Link(A, B, 1e9, None),
    "shared cores as text": lambda model, cluster: tvm_split.SharedCores((A, B), "two"),
    "threads as a truth value": lambda model, cluster: tvm_split.Machine(A, threads=True),
    "memory as text": lambda model, cluster: tvm_split.Machine(A, memory_bytes="16 GB"),
    "an address as endpoint": lambda model, cluster: tvm_split.Machine(A, endpoint="10.0.0.7:7001"),
}


def doubled(times: int) -> list[Any]:
    values: list[Any] = []
    for _ in range(times):
        values = [values, values]
    return values


def endless() -> list[Any]:
    value: list[Any] = []
    value.append((value, value))
    return value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", PLANS.values(), ids=PLANS)
def test_what_cannot_be_meant_is_refused_in_a_sentence(
    call: Callable[[tvm_split.Model, tvm_split.Cluster], Any], model: tvm_split.Model
) -> None:
    with pytest.raises(tvm_split.TvmSplitError) as error:
        call(model, tvm_split.Cluster.in_process(2))
    assert len(str(error.value)) < 800


@pytest.mark.parametrize("name", [name for name in tvm_split.__all__ if name[0].islower()])
def test_missing_and_unknown_arguments_are_named(name: str) -> None:
    function = getattr(tvm_split, name)
    first = next(iter(inspect.signature(function).parameters))
    for arguments in ({}, {"no_such_argument": 1}):
        with pytest.raises(tvm_split.InputError, match=f"tvm_split.{name}: missing .*'{first}'"):
            function(**arguments)


@pytest.mark.parametrize("value", [3, "nope", Path("nope.json"), None, {}, []])
@pytest.mark.parametrize("name", [name for name in tvm_split.__all__ if name[0].islower()])
def test_values_of_other_classes_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(tvm_split, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if name == "merge_databases" and isinstance(value, str | Path):
        return  # folders that are made
    with pytest.raises(tvm_split.TvmSplitError):
        function(*[value] * len(needed))


OPTIONAL = (
    *("batch", "in_flight", "micro_batches"),
    *("stages", "maximum_machines", "maximum_latency_seconds", "minimum_throughput"),
)
"""Parameters that are numbers or None."""


def numbers() -> list[tuple[str, str]]:
    """Return all pairs of a public function and one of its parameters that is a number."""
    return [
        (name, parameter.name)
        for name in tvm_split.__all__
        if name[0].islower()
        for parameter in inspect.signature(getattr(tvm_split, name)).parameters.values()
        if type(parameter.default) in (int, float) or parameter.name in ("threads", *OPTIONAL)
    ]


@pytest.mark.parametrize(("name", "number"), numbers())
def test_a_value_that_is_no_such_number_is_named(bundle: tvm_split.Bundle, name: str, number: str) -> None:
    function = getattr(tvm_split, name)
    values = {
        **{"model": "small.onnx", "source": network(), "example_inputs": (X,), "cluster": "in-process:2"},
        **{"current": bundle.plan, "measured": Measured(), "threads": 1},
    }
    parameters = inspect.signature(function).parameters.values()
    named = {one.name: values.get(one.name) for one in parameters if one.default is one.empty or one.name in values}
    wrong: list[Any] = ["x", math.nan, math.inf, True, [1]]
    wrong += [] if number in OPTIONAL else [None]
    wrong += [] if number == "seed" else [-1]
    wrong += [] if "seconds" in number or number in ("minimum_throughput", "allow_lossy") else [3.5]
    for value in wrong:
        with pytest.raises(tvm_split.TvmSplitError) as error:
            function(**{**named, number: value})
        assert f"{number} is {value!r}" in str(error.value)


RUNS: dict[str, Callable[[tvm_split.Deployment], Any]] = {
    "nothing": lambda deployment: deployment.run(),
    "a wrong name": lambda deployment: deployment.run(y=X),
    "text": lambda deployment: deployment.run("x"),
    "a list of arrays": lambda deployment: deployment.run([X]),
    "a number as a stream": lambda deployment: deployment.stream(3),
    "rows as a stream": lambda deployment: list(deployment.stream(X)),
    "no output of that name": lambda deployment: deployment.run(X)["logits"],
    "nothing to measure": lambda deployment: tvm_split.bench(deployment, []),
}


@pytest.mark.parametrize("call", RUNS.values(), ids=RUNS)
def test_wrong_inputs_are_refused_in_a_sentence(
    call: Callable[[tvm_split.Deployment], Any], bundle: tvm_split.Bundle
) -> None:
    with (
        tvm_split.deploy(bundle, "in-process:2") as deployment,
        pytest.raises(tvm_split.InputError),
    ):
        call(deployment)


@pytest.mark.parametrize("wrong", [(X,) * 2, {"y": X}, torch.ones(2, 5)])
def test_a_wrong_micro_batch_has_its_position(bundle: tvm_split.Bundle, wrong: Any) -> None:
    with tvm_split.deploy(bundle, "in-process:2") as deployment:
        stream = deployment.stream([X, X, wrong, X])
        assert len([next(stream), next(stream)]) == 2
        with pytest.raises(tvm_split.InputError, match="micro-batch 2 "):
            next(stream)


@pytest.mark.parametrize("fields", [{"profile": "folder"}, {"profile": {}}, {"allow_lossy": 5}])
def test_a_wrong_field_of_a_request_is_named(model: tvm_split.Model, fields: dict[str, Any]) -> None:
    with pytest.raises(tvm_split.PlanError, match=f"^{next(iter(fields))} is "):
        tvm_split.plan(model, "in-process:2", **fields)
