"""What a run measured, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tvm_split.cli.console import new_table
from tvm_split.rpc_runtime.program.measurements import StageStatistics
from tvm_split.units import bytes_text, seconds_text


def statistics_table(stages: Sequence[StageStatistics], title: str) -> Table:
    """Times per stage: what it computed, waited for inputs, and spent on the wire; and the bytes it sent."""
    caption = "median of one micro-batch, the rest in all; receiving and sending overlap computing"
    numbers = ("median", "compute", "wait", "receive", "send", "sent")
    table = new_table(title, ("stage", "machine"), numbers, caption)
    for stage in stages:
        seconds = (
            stage.median_compute_seconds,
            stage.compute_seconds,
            stage.wait_seconds,
            stage.receive_seconds,
            stage.send_seconds,
        )
        table.add_row(Text(stage.name), Text(stage.machine), *map(seconds_text, seconds), bytes_text(stage.bytes_sent))
    return table


def statistics_as_json(stages: Sequence[StageStatistics]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(stage) for stage in stages]
