"""The explanation of a plan, from predictions written by hand."""

import dataclasses
import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from rpc_runtime.program.codec import Codec
from tests.helpers.planner.predictions import machine_prediction, prediction
from tvm_split.cli.plan_report import memory_text, predicted_lines, prediction_as_json, print_plan
from tvm_split.planner.codec_choice import PlannedCodec
from tvm_split.planner.plan import Plan, PlannedMachine
from tvm_split.planner.prediction import LinkPrediction
from tvm_split.planner.problem import CoresLoad, Sharding, Stage

A, B = "machine-a", "machine-b"
LONG = "features.denseblock1.denselayer1.conv1"


def plan(first: str = A, objective: str = "throughput") -> Plan:
    """Three stages on two machines, one of which has the first and the last."""
    machines = tuple(PlannedMachine(name, {"kind": "llvm"}, 1) for name in (first, B))
    stages = (
        Stage((first,), (LONG, "[b]relu[/b]", "conv_2"), name="stage_0"),
        Stage((B,), ("dense", "softmax"), name="stage_1"),
        Stage((first,), ("last",), name="stage_2"),
    )
    expected = prediction(
        (machine_prediction(first, 0.012, memory_limit_bytes=12e6), machine_prediction(B, 0.010, estimated_share=0.3))
    )
    return Plan("net", objective, "dynamic programming", machines, stages, expected)


def shown(given: Plan, *, shares: Sequence[float] = (0.5, 0.4, 0.1), details: bool = False) -> str:
    file = io.StringIO()
    print_plan(given, shares, 1_007_200.0, Console(file=file, width=80), details=details)
    return file.getvalue()


def test_codecs_are_said_with_what_they_save_and_cost():
    codecs = (
        PlannedCodec("[b]cut[/b]", A, B, Codec.INT8, 3.984, 0.0043),
        PlannedCodec("last", B, "client", Codec.ZSTD, 1.5, 0.0),
        PlannedCodec("other", B, A, Codec.FP16),
    )
    for given in (plan(), dataclasses.replace(plan(), prediction=None)):
        text = " ".join(shown(dataclasses.replace(given, codecs=codecs)).split())
        for words in (
            "machine-a → machine-b: [b]cut[/b] as int8, 3.98 times smaller, changes the outputs by 0.0043 of their",
            "machine-b → client: last as zstd, 1.50 times smaller machine-b",
            "machine-b → machine-a: other as fp16, changes the outputs by an unknown share",
        ):
            assert words in text, words
    assert "times smaller" not in shown(plan())
    assert "other travels as it is" in shown(dataclasses.replace(plan(), remarks=("other travels as it is: why",)))


def test_what_carries_the_links_is_told():
    given = plan()
    links = (
        LinkPrediction("client", A, 4.0, 1e-4, 1e-5, "shm"),
        LinkPrediction(A, B, 4.0, 1e-4, 1e-5, "grpc"),
        LinkPrediction(B, "client", 4.0, 1e-4, 1e-5, "shm"),
        LinkPrediction(B, A, 4.0, 1e-4, 1e-5),
    )
    text = shown(dataclasses.replace(given, prediction=dataclasses.replace(given.prediction, links=links)))
    assert "\nLinks over shared memory: client → machine-a, machine-b → client\n" in text
    assert "\nLinks over gRPC: machine-a → machine-b\n" in text
    assert "Links over" not in shown(given)


def test_cores_that_are_too_few_are_told():
    expected = dataclasses.replace(plan().prediction, shared_cores=(CoresLoad((A, B, "client"), 1, 0.022, 2),))
    told = " ".join(shown(dataclasses.replace(plan(), prediction=expected)).split())
    assert "machine-a, machine-b, client share one core: a result takes 22.000 ms of one, so no more than 45.45" in told
    enough = dataclasses.replace(expected, shared_cores=(CoresLoad((A, B, "client"), 2, 0.022, 2),))
    assert "a result takes" not in " ".join(shown(dataclasses.replace(plan(), prediction=enough)).split())


def test_what_matters_fits_a_small_window():
    text = shown(plan())
    for words in (
        "83.33 micro-batches a second (one every 12.000 ms)",
        "Limited by machine-a (compute); at most 2.00% from the best; measured 2 hours ago",
        "Best without a planner: one machine",
        "--details",
    ):
        assert words in " ".join(text.split()), words
    assert len(text.splitlines()) <= 20
    assert "Plans that lost" not in text
    assert "Method" not in text


def test_doubts_are_told():
    given = plan()
    doubts = ("machine-a took 0.31 ms and machine-b 4.04 ms for the same",)
    doubtful = dataclasses.replace(given, prediction=dataclasses.replace(given.prediction, doubts=doubts))
    assert "Doubtful: machine-a took 0.31 ms and machine-b" in shown(doubtful)
    assert "Doubtful" not in shown(given)


def test_everything_is_told():
    text = " ".join(shown(plan(), details=True).split())
    for words in (
        "3 stages for throughput, dynamic programming",
        "layers)",
        "(1 layer)",
        "conv_2",
        "12.000",
        "6.0 MB 50%",
        "30%",
        "83.33 micro-batches a second (one every 12.000 ms)",
        "Bubble: machines wait 12.5% of the time. In flight: 3",
        "no plan has a period below 11.760 ms",
        "this one's gap to it is 2.00%",
        "dynamic programming, exact for this chain",
        "Limited by machine-a (compute)",
        "machine-z stays idle",
        "measured 2 hours ago",
        "Without a planner",
        "equal layers",
        "0.67",
        "Plans that lost",
        "cut after [b]relu_2[/b]: sends more",
    ):
        assert words in text, words


@pytest.mark.parametrize("machine", [A, "a-machine-with-a-very-long-name.lab.example.org", "[red]box[/red]"])
def test_it_fits_80_columns(machine):
    text = shown(plan(machine), details=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "12.000" in text  # numbers are never cut


def test_numbers_of_a_machine_stand_once():
    assert shown(plan()).count("12.000") == 2  # in its first stage, and as the period


@pytest.mark.parametrize("is_predicted", [True, False])
def test_many_stages_are_told_by_machine(is_predicted):
    given = plan()
    stages = tuple(
        Stage((A, B), (f"conv_{i}", f"relu_{i}"), (0.75, 0.25), f"stage_{i}", Sharding("rows")) for i in range(20)
    )
    given = dataclasses.replace(given, stages=stages, prediction=given.prediction if is_predicted else None)
    text, details = shown(given, shares=[0.05] * 20), shown(given, shares=[0.05] * 20, details=True)
    assert len(text.splitlines()) <= 40
    assert "Every stage, and how each is shared and sends: --details" in text
    for name, share, compute in ((A, "75.0%", "12.000"), (B, "25.0%", "10.000")):
        (row,) = (line for line in text.splitlines() if "20 stages" in line and name in line)
        assert "40 layers" in row
        assert (compute if is_predicted else share) in row
    assert all(f"stage_{i} " in details for i in range(20))
    assert details.count("stage_19 together") == 1
    assert "Every stage" not in details


def test_without_a_prediction_the_stages_are_shown():
    text = shown(dataclasses.replace(plan(), prediction=None))
    assert "estimated share" in text
    assert "40.0%" in text
    assert "[b]relu[/b]" in text
    assert "Predicted" not in text


def test_latency_first_for_latency():
    for_latency = plan(objective="latency")
    assert predicted_lines(for_latency.prediction, "latency", 0.0)[0].startswith("Predicted: 19.800 ms for one alone")
    assert "no plan has a latency below" in shown(for_latency, details=True)
    found = prediction_as_json(for_latency)
    assert found["baselines"][0]["ratio"] == pytest.approx(1 / 0.9)


def test_as_json():
    found = json.loads(json.dumps(prediction_as_json(plan())))
    assert found["samples_per_second"] == pytest.approx(1 / 0.012)
    assert [row["memory_bytes"] for row in found["machines"]] == [6e6, 6e6]
    assert [row["ratio"] for row in found["baselines"]] == [pytest.approx(0.5), pytest.approx(1 / 1.5)]
    assert found["alternatives"][0]["why"] == "sends more"
    assert prediction_as_json(dataclasses.replace(plan(), prediction=None)) is None


def test_memory():
    assert memory_text(5e6, None) == "5.0 MB"
    assert memory_text(3e6, 4e6) == "3.0 MB 75%"
    assert memory_text(8e6, 4e6) == "8.0 MB 200%"
