"""Timelines of many machines are drawn, and no larger than programs can open."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpc_runtime.program.measurements import COMPUTE, SEND, TraceEvent
from tvm_split.pictures.timeline_picture import draw_picture


@pytest.mark.parametrize("machines", [2, 400])
def test_the_picture_of_many_machines_has_a_size_that_can_be_written(tmp_path: Path, machines: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    names = [f"machine-{number}" for number in range(machines)]
    events = [
        TraceEvent(name, "stage", 0, kind, number * 10**6, (number + 1) * 10**6, 0)
        for number, name in enumerate(names)
        for kind in (COMPUTE, SEND)
    ]
    draw_picture(events, names, "many", [tmp_path / "work.png"])
    height, width, _ = image.imread(tmp_path / "work.png").shape
    assert 100 < height < 8000
    assert width == 1650
