"""The explanation of a plan, from predictions written by hand."""

import dataclasses
import io
import json
import time

import pytest
from rich.console import Console

from tests.helpers.placement.predictions import machine_prediction, prediction
from tvm_split.display.plan import plan_parts, prediction_as_json
from tvm_split.display.view import print_parts
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.problem import Stage

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


def shown(displayed_plan: Plan, *, details: bool = False) -> str:
    file = io.StringIO()
    print_parts(plan_parts(displayed_plan, (0.5, 0.4, 0.1), details=details), Console(file=file, width=80))
    return file.getvalue()


@pytest.mark.parametrize("machine", [A, "a-machine-with-a-very-long-name.lab.example.org", "[red]box[/red]"])
def test_it_fits_80_columns(machine):
    text = shown(plan(machine), details=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "12.000" in text  # numbers are never cut


@pytest.mark.parametrize(("limit", "text"), [(12e6, "6.0 MB 50%"), (0.0, "6.0 MB of 0 B"), (None, "6.0 MB  ")])
def test_memory_is_shown_beside_its_limit(limit, text):
    """A plan file may say 0, as for a machine that holds nothing."""
    machines = machine_prediction(A, 0.012, memory_limit_bytes=limit), machine_prediction(B, 0.010)
    assert text in shown(dataclasses.replace(plan(), prediction=prediction(machines)))


def test_the_range_of_ages_is_shown():
    now = time.time()
    expected = dataclasses.replace(plan().prediction, profiled_at=now - 7300, profiled_until=now)
    assert "measured less than a minute to 2 hours ago" in " ".join(
        shown(dataclasses.replace(plan(), prediction=expected)).split()
    )


def test_a_long_name_keeps_whole_parts_of_its_path():
    stages = (dataclasses.replace(plan().stages[0], layers=("/features/block1/conv_18/Conv",)), *plan().stages[1:])
    assert "…/conv_18/Conv" in shown(dataclasses.replace(plan(), stages=stages))


def test_without_a_prediction_the_stages_are_shown():
    text = shown(dataclasses.replace(plan(), prediction=None))
    assert "40.0%" in text
    assert "[b]relu[/b]" in text  # a name is no markup


def test_as_json():
    content = json.loads(json.dumps(prediction_as_json(plan())))
    assert content["micro_batches_per_second"] == pytest.approx(1 / 0.012)
    assert [row["memory_bytes"] for row in content["machines"]] == [6e6, 6e6]
    assert [row["ratio"] for row in content["baselines"]] == [pytest.approx(0.5), pytest.approx(1 / 1.5)]
    assert content["alternatives"][0]["why"] == "sends more"
    assert prediction_as_json(dataclasses.replace(plan(), prediction=None)) is None
