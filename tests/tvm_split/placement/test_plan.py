"""Plan files with replicas and shards: files are read back, and errors name what is wrong."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tvm_split
from tvm_split.errors import PlanError
from tvm_split.placement.plan import Plan, PlannedCodec, PlannedMachine
from tvm_split.placement.prediction import LinkPrediction, Prediction
from tvm_split.placement.problem import CoresLoad, Sharding, Stage

LLVM = {"kind": "llvm"}
MACHINES = tuple(PlannedMachine(f"machine-{letter}", LLVM, 1) for letter in "abc")
REPLICATED = Stage(("machine-b", "machine-c"), ("2",), (0.67, 0.33), "stage_1")
SHARED = Stage(("machine-b", "machine-c"), ("2",), (0.67, 0.33), "stage_1", Sharding("channels", "each"))
PREDICTION = Prediction(1.0, 2.0, 0.0, 2, 1.0, 0.0, "machine-b", "by hand", "", 0.0, (), ())
PREDICTION = dataclasses.replace(PREDICTION, shared_cores=(CoresLoad(("machine-a", "client"), 2, 1.5, 1),))


def planned() -> Plan:
    first = Stage(("machine-a",), ("0", "1"), name="stage_0")
    return Plan("Model", "throughput", "test", MACHINES, (first, REPLICATED))


def test_schedules_of_stages_that_never_meet_are_refused_together() -> None:
    machines = tuple(PlannedMachine(f"machine-{letter}", LLVM, 1) for letter in "abcdef")
    stages = tuple(
        Stage((f"machine-{first}", f"machine-{second}"), (layer,), (1 - 1 / length, 1 / length), f"stage_{layer}")
        for layer, (first, second), length in (("0", "ab", 59), ("1", "cd", 53), ("2", "ef", 47))
    )
    assert math.lcm(*(len(stage.replica_schedule) for stage in stages[:2])) == 59 * 53
    Plan("Model", "throughput", "by hand", machines, stages[:2])
    words = (
        "lengths stage_0 59, stage_1 53, stage_2 47: the schedules repeat together after more than 16384 micro-batches"
    )
    with pytest.raises(PlanError, match=words):
        Plan("Model", "throughput", "by hand", machines, stages)


def test_codecs_stand_in_the_file_in_plain_words(tmp_path: Path) -> None:
    codecs = (
        PlannedCodec("layer_1", "machine-a", "machine-b", "int8", 3.99, 0.004),
        PlannedCodec("layer_1", "machine-a", "machine-c", "zstd"),
    )
    plan = dataclasses.replace(
        planned(), codecs=codecs, prediction=PREDICTION, remarks=("layer_2 is sent without a codec",)
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["codecs"][0] == {
        "tensor": "layer_1",
        "source": "machine-a",
        "destination": "machine-b",
        "codec": "int8",
        "ratio": 3.99,
        "output_error": 0.004,
    }
    del content["codecs"][1]
    assert Plan.from_dict(content).prediction is None  # the prediction was for both
    content["codecs"][0]["codec"] = "fp8"
    with pytest.raises(tvm_split.PlanError, match=r"codecs\.0.*'fp8'"):
        Plan.from_dict(content)
    assert not {"codecs", "remarks"} & planned().to_dict().keys()


def test_a_prediction_is_forgotten_when_someone_edits_a_share() -> None:
    content = dataclasses.replace(planned(), prediction=PREDICTION).to_dict()
    assert Plan.from_dict(json.loads(json.dumps(content))).prediction == PREDICTION
    content["stages"][1]["shares"] = [0.5, 0.5]
    assert Plan.from_dict(content).prediction is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(period_seconds=float("nan")), "prediction.period_seconds: must be a finite number"),
        (lambda p: p.update(in_flight=0), r"prediction.in_flight: .*greater than or equal to 1 \(it is 0\)"),
        (
            lambda p: p["shared_cores"][0].update(cores=0),
            "prediction.shared_cores.0.cores: .*greater than or equal to 1",
        ),
        (lambda p: p["links"][0].update(seconds=-1), r"prediction.links.0.seconds: .*equal to 0 \(it is -1\)"),
        (lambda p: p["links"][0].update(bytes=float("inf")), "prediction.links.0.bytes: .*finite number"),
        (
            lambda p: p.update(corrections={"link_speeds": [["a", "b", 1e-308]]}),
            "prediction.corrections.link_speeds.0.2: ",
        ),
    ],
)
def test_numbers_that_no_prediction_has_are_named(change: Callable[[dict[str, Any]], None], words: str) -> None:
    links = (LinkPrediction("machine-a", "machine-b", 4.0, 0.2, 0.1),)
    content = dataclasses.replace(planned(), prediction=dataclasses.replace(PREDICTION, links=links)).to_dict()
    content = json.loads(json.dumps(content))
    change(content["prediction"])
    with pytest.raises(tvm_split.PlanError, match=f"plan.json: {words}"):
        Plan.from_dict(content, source="plan.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["stages"][1].update(name=p["stages"][0]["name"]), "two stages of the plan are named 'stage_0'"),
        (lambda p: p["stages"][1].update(name="../x"), "a stage is named '../x'"),
        (lambda p: p["stages"][1].update(name=""), "a stage is named ''"),
        (lambda p: p["stages"][0]["layers"].append(p["stages"][0]["layers"][0]), "is in stage_0 twice"),
        (lambda p: p["machines"].append(p["machines"][0]), "two machines of the plan are named 'machine-a'"),
        (lambda p: p.update(machines=[]), "the plan has no machines"),
        (lambda p: p.update(stages=[]), "the plan has no stages"),
        (lambda p: p.update(inputs=[{"name": "x", "shape": [1], "dtype": "float99"}]), "input 'x' .* 'float99'"),
        (lambda p: p.update(version="2"), "of version '2', and this tvm-split reads version 2"),
    ],
)
def test_what_no_plan_has_is_named(change: Callable[[dict[str, Any]], None], words: str) -> None:
    content = json.loads(json.dumps(planned().to_dict()))
    change(content)
    with pytest.raises(tvm_split.PlanError, match=words):
        Plan.from_dict(content, source="plan.json")


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda stage: stage.__setitem__(key, value)


REPLICATED_CASES = [
    (REPLICATED, *case)
    for case in (
        (_set("machines", ["machine-b", "machine-b"]), "stage_1 has two replicas on 'machine-b'"),
        (_set("machines", ["machine-b", "machine-z"]), "the plan names no machine 'machine-z'"),
        (_set("machines", ["machine-b"]), "stage_1 has 1 machines and 2 shares; give one"),
        (_set("machines", []), "stage_1 has 0 machines and 2 shares"),
        (_set("shares", [0.67, 0]), r"stages.1.shares.1: .*greater than 0"),
        (_set("shares", [0.67, 1e308]), r"stages.1.shares.1: .*less than"),
        (_set("shares", [0.67, 0.001]), "stage_1 on 'machine-b', 'machine-c': the share .* one micro-batch"),
        (_set("weights", [1]), r"stages.1.weights: there is no such key"),
    )
]
SHARDED_CASES = [
    (SHARED, *case)
    for case in (
        (_set("machines", ["machine-b", "machine-b"]), "stage_1 has two shards on 'machine-b'"),
        (_set("shares", [0.67, 0.5]), r"shares of stage_1, .*, add up to 1.17; make them 1"),
        (_set("sharding", {"axis": "depth"}), r"stages.1.sharding.axis: .*'rows', 'columns', .* \(it is 'depth'\)"),
        (_set("sharding", {"axis": "rows", "exchange": "all"}), r"stages.1.sharding.exchange: .*'fused' or 'each'"),
        (_set("sharding", {"axis": "rows", "halo": 1}), r"stages.1.sharding.halo: "),
        (_set("sharding", {}), r"stages.1.sharding.axis: "),
        (lambda s: s.update(machines=["machine-b"], shares=[1.0]), "stage_1 has a sharding and one machine"),
    )
]


@pytest.mark.parametrize(("stage", "change", "words"), [*REPLICATED_CASES, *SHARDED_CASES])
def test_stages_that_cannot_work_are_refused(
    stage: Stage, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    content = dataclasses.replace(planned(), stages=(planned().stages[0], stage)).to_dict()
    change(content["stages"][1])
    with pytest.raises(tvm_split.PlanError, match=words) as caught:
        Plan.from_dict(content, source="plan.json")
    assert "plan.json" in str(caught.value)


def shared() -> Plan:
    return dataclasses.replace(planned(), stages=(planned().stages[0], SHARED))


def test_a_plan_with_shards_survives_its_file(tmp_path: Path) -> None:
    shared().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == shared()
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["stages"][0] == {"name": "stage_0", "machines": ["machine-a"], "layers": ["0", "1"]}
    assert content["stages"][1] == {
        "name": "stage_1",
        "machines": ["machine-b", "machine-c"],
        "shares": [0.67, 0.33],
        "sharding": {"axis": "channels", "exchange": "each"},
        "layers": ["2"],
    }
    del content["stages"][1]["sharding"]["exchange"]  # the most usual form
    assert Plan.from_dict(content).stages[1].sharding == Sharding("channels", "fused")


def test_a_sharded_stage_has_no_replica_schedule() -> None:
    uneven = dataclasses.replace(SHARED, shares=(0.999, 0.001))  # there is no round-robin schedule for these
    assert dataclasses.replace(planned(), stages=(uneven,)).stages[0].replica_schedule == (0,)
