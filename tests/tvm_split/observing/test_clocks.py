"""Workers with other clocks: no tensor arrives before it is sent, and the stated error covers the truth."""

import sys
import time
from pathlib import Path

import numpy as np

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.pipelines import over_grpc
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain
from tests.helpers.rpc_runtime.worker_process import ROOT, ready, start_worker
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.observing.recording import Recording
from tvm_split.observing.trace import transfers

SECOND = 1_000_000_000
CLOCKS = {A: (SECOND // 5, 200), B: (-SECOND // 5, -200), C: (0, 0)}
"""By worker: how many nanoseconds its clock is ahead of this one's, and how many microseconds it gains in a second."""
SHIFTED = str(ROOT / "tests" / "helpers" / "rpc_runtime" / "with_other_clock.py")


def test_clocks_that_differ_and_drift(tmp_path: Path) -> None:
    base, processes, endpoints = time.monotonic_ns(), [], {}
    maker = ProgramMaker(tmp_path / "blobs")
    program = chain(maker)
    for name, (ahead, ppm) in CLOCKS.items():
        within = (sys.executable, SHIFTED, str(base), str(ahead), str(ppm))
        arguments = ("--json", "--name", name)
        process = start_worker(tmp_path / name, *arguments, within=within, TVM_SPLIT_TOKEN="abc")
        processes.append(process)
        endpoints[name] = WorkerEndpoint(name, ready(process), "abc")
    try:
        with Session(Opening(program, endpoints, maker.blob_path, links=over_grpc(program))) as pipeline:
            recording = Recording("net", pipeline)
            recording.start()
            for _ in range(3):
                list(pipeline.stream(batches_for(program, 60)))
                time.sleep(0.7)  # so long that an unnoticed drift would be longer than a transfer
            recording.stop()
            trace, raw = recording.trace, pipeline.observe({})
    finally:
        for process in processes:
            process.terminate()
            process.communicate(timeout=PATIENCE_SECONDS)
    links = [*transfers(trace.machines)]
    assert len(links) == 4
    for moved in links:
        assert ((moved.received["start"] + moved.received["duration"]) >= moved.sent["start"]).all(), moved.source
    for name, (ahead, ppm) in CLOCKS.items():
        machine, recorded = trace.machines[name], raw[name].table()
        assert np.array_equal(machine.rows["number"], recorded["number"])
        # The inverse of the worker's clock.
        truth = base + (recorded["start"] - base - ahead) * 1_000_000 // (1_000_000 + ppm)
        off = np.abs(machine.rows["start"] - truth).max()
        assert off <= machine.clock_error_nanoseconds + 2
        assert machine.clock_error_nanoseconds < SECOND // 5  # which is what the clocks differ by
    assert trace.machines[C].clock_error_nanoseconds == 0
    assert "Clocks are right to" in str(trace)
