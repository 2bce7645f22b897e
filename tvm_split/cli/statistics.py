"""What a run measured, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rpc_runtime.measurements import StageStatistics
from tvm_split.cli.console import bytes_text, milliseconds_text


def statistics_table(stages: Sequence[StageStatistics], title: str) -> Table:
    """Milliseconds per stage: what it computed, waited for inputs, and spent on the wire."""
    table = Table(title=Text(title), caption="milliseconds in all; receiving and sending overlap computing")
    table.add_column("stage")
    table.add_column("machine")
    for heading in ("batches", "median", "compute", "wait", "receive", "send", "received", "sent"):
        table.add_column(heading, justify="right")
    for stage in stages:
        seconds = (
            stage.median_compute_seconds,
            stage.compute_seconds,
            stage.wait_seconds,
            stage.receive_seconds,
            stage.send_seconds,
        )
        sizes = (bytes_text(stage.bytes_received), bytes_text(stage.bytes_sent))
        counted = str(stage.micro_batches)
        table.add_row(stage.name, Text(stage.machine), counted, *map(milliseconds_text, seconds), *sizes)
    return table


def statistics_as_json(stages: Sequence[StageStatistics]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(stage) for stage in stages]
