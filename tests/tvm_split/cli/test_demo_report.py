"""What the demonstration says of its timeline, from events written by hand."""

import numpy as np
import pytest

from rpc_runtime.hardware import HostCores
from rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, StageStatistics, TraceEvent
from tests.helpers.traces import CHAIN, MILLISECOND, A, B, plan_for
from tvm_split.cli import demo_report
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.bundle import Bundle, Verified
from tvm_split.demo.demonstration import MICRO_BATCH, Demonstration, Run

EVENTS = tuple(
    TraceEvent(machine, stage, 0, kind, start * MILLISECOND, end * MILLISECOND)
    for machine, stage, kind, start, end in (
        (A, "stage_0", RECEIVE, 0, 10),
        (A, "stage_0", COMPUTE, 10, 60),
        (A, "stage_0", SEND, 60, 70),
        (B, "stage_1", RECEIVE, 10, 40),
        (B, "stage_1", COMPUTE, 40, 90),
        (B, "stage_1", SEND, 90, 100),
    )
)
"""Of the 80 ms from the first computing to the last, two compute in 20; of all 100 ms, two are at work in 60."""


@pytest.fixture
def found() -> Demonstration:
    """Ten micro-batches of 8 ms one by one, of which 5 ms are computing; the first events say something else."""
    bundle = Bundle("net", plan_for(CHAIN), CHAIN, {}, {}, {}, ("z",), Verified.NO, BlobFolder.temporary())
    stages = tuple(
        StageStatistics(name, machine, 1000, 4.0, median)
        for name, machine, median in (("stage_0", A, 0.003), ("stage_1", B, 0.002))
    )
    ran = Run(np.zeros(1), 0.050, 0.080, stages, EVENTS, EVENTS[:3])
    return Demonstration(bundle, {}, ran, 10 * MICRO_BATCH, 0.97, 0.97, 1e-6)


def test_computing_at_once_is_told_apart_from_being_at_work(found, monkeypatch):
    monkeypatch.setattr(demo_report, "own_cores", lambda: HostCores("", (0, 1)))
    text = demo_report._overlap(found)
    for words in (
        "a machine computed 100% of the time, and two or more at once 25% of it",
        "with receiving and sending, two or more were at work 60% of it",
        "A micro-batch by itself takes 8 ms, of which machines compute 5 ms",
        "2 cores for 3 processes",
    ):
        assert words in text, text
    monkeypatch.setattr(demo_report, "own_cores", lambda: HostCores("", (0, 1, 2)))
    assert "cores" not in demo_report._overlap(found)


def test_as_json(found, tmp_path):
    content = demo_report.as_json(found, tmp_path)
    assert content["machines_computing_at_once"] == {"1": pytest.approx(0.75), "2": pytest.approx(0.25)}
    assert content["machines_at_work_at_once"] == {"1": pytest.approx(0.4), "2": pytest.approx(0.6)}
    assert content["gain"] == pytest.approx(1.6)
