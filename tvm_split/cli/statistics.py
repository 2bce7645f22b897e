"""What a run measured, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tvm_split.rpc_runtime.program.measurements import StageStatistics
from tvm_split.units import bytes_text


def statistics_table(stages: Sequence[StageStatistics], title: str) -> Table:
    """Milliseconds per stage: what it computed, waited for inputs, and spent on the wire; and the bytes it sent."""
    caption = "milliseconds; median of one micro-batch, the rest in all. Receiving and sending overlap computing."
    table = Table(title=Text(title), caption=caption, box=box.SIMPLE_HEAD, title_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("machine", overflow="fold")
    for heading in ("median", "compute", "wait", "receive", "send", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        seconds = (
            stage.median_compute_seconds,
            stage.compute_seconds,
            stage.wait_seconds,
            stage.receive_seconds,
            stage.send_seconds,
        )
        numbers = [f"{value * 1e3:.3f}" for value in seconds[:1]] + [f"{value * 1e3:.2f}" for value in seconds[1:]]
        table.add_row(Text(stage.name), Text(stage.machine), *numbers, bytes_text(stage.bytes_sent))
    return table


def statistics_as_json(stages: Sequence[StageStatistics]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(stage) for stage in stages]
