"""Traces from the command line: of a run, and of a deployment of somebody else."""

import itertools
import json
import threading

import pytest

from rpc_runtime.client.session import Session
from rpc_runtime.program.events import COMPUTE, KERNEL, SEND
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain
from tvm_split.observing.about import About, AboutLink, AboutStage, text_of
from tvm_split.observing.trace import Trace

NAMES = (A, B, C)


@pytest.fixture
def addresses(start_process, tmp_path):
    (tmp_path / "token").write_text("open-sesame\n")
    processes = [
        start_process(
            *("worker", "--listen", "127.0.0.1:0", "--name", name, "--cache", tmp_path / name),
            *("--token-file", tmp_path / "token", "--json"),
        )
        for name in NAMES
    ]
    return [json.loads(process.stdout.readline())["address"] for process in processes]


@pytest.fixture
def cluster(addresses, tmp_path):
    machines = [
        {"name": name, "address": address, "token_file": str(tmp_path / "token")}
        for name, address in zip(NAMES, addresses, strict=True)
    ]
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"machines": machines}))
    return path


def test_a_deployment_of_somebody_else(invoke, invoke_json, addresses, cluster, tmp_path):
    maker = ProgramMaker(tmp_path / "blobs")
    program = chain(maker)
    endpoints = {
        name: WorkerEndpoint(name, address, "open-sesame") for name, address in zip(NAMES, addresses, strict=True)
    }
    assert "no deployment runs" in invoke("trace", "--cluster", cluster, code=1).stderr
    ended = threading.Event()
    stages = tuple(AboutStage(stage.name, stage.machine, ("conv", "relu")) for stage in program.stages)
    about = About(stages, 0.25, 0.5, {A: 0.125}, (AboutLink(A, B, 0.25),))
    with Session(program, endpoints, maker.blob_path, model="net", about=text_of(about)) as pipeline:

        def stream() -> None:
            batches = itertools.takewhile(lambda _: not ended.is_set(), itertools.cycle(batches_for(program, 2)))
            for _ in pipeline.stream(batches):
                pass

        thread = threading.Thread(target=stream)
        thread.start()
        try:
            output = tmp_path / "run.json"
            summary = invoke_json(
                "trace", "--cluster", cluster, "--seconds", "0.7", "--kernels", "2", "--output", output
            )
            wrong = invoke("trace", "--cluster", cluster, "--deployment", "other", code=1).stderr
            text = invoke("trace", "--cluster", cluster, "--seconds", "0.3", "--deployment", "net").stdout
        finally:
            ended.set()
            thread.join()
    assert summary["model"] == "net"
    assert [machine["machine"] for machine in summary["machines"]] == list(NAMES)
    assert all(machine["micro_batches"] > 0 for machine in summary["machines"])
    assert "named 'other'" in wrong
    assert "net of " in " ".join(wrong.split())
    assert "bubble" in text
    trace = Trace.load(output)
    assert trace.about == about
    assert {event.machine for event in trace.of_kind(KERNEL)} == set(NAMES)
    assert len({event.sequence for event in trace.of_kind(KERNEL) if event.machine == B}) <= 2
    assert sum(event.kind == COMPUTE for event in trace) >= 3
    links = {(event.machine, event.peer) for event in trace if event.kind == SEND}
    assert links == {(A, B), (B, C), (C, "client")}


def test_wrong_use(invoke, tmp_path):
    assert "name the workers" in invoke("trace", code=2).stderr
    assert "needs --trace" in invoke("run", tmp_path, "--kernels", "3", code=2).stderr
    refused = invoke("trace", "--cluster", "at:127.0.0.1:9", "--output", tmp_path / "run.txt", code=2).stderr
    assert "suffixes of a trace" in refused
    assert "127.0.0.1:9" in invoke("trace", "--cluster", "at:127.0.0.1:9", "--timeout", "1", code=2).stderr
