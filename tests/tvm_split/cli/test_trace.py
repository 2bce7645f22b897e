"""Traces from the command line: of a run, and of a deployment of somebody else."""

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.program.events import COMPUTE, KERNEL, SEND
from tests.helpers.labs import streaming, write_lab
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain
from tvm_split.observing.about import About, AboutLink, AboutStage, text_of
from tvm_split.observing.trace import Trace

NAMES = (A, B, C)


def test_a_deployment_of_somebody_else(invoke, invoke_json, three_workers, tmp_path):
    maker = ProgramMaker(tmp_path / "blobs")
    program, cluster = chain(maker), write_lab(tmp_path, three_workers.endpoints())
    assert "no deployment runs" in invoke("trace", "--cluster", cluster, code=1).stderr
    stages = tuple(AboutStage(stage.name, stage.machine, ("conv", "relu")) for stage in program.stages)
    about = About(stages, 0.25, 0.5, {A: 0.125}, (AboutLink(A, B, 0.25),))
    output, ends = tmp_path / "run.json", three_workers.endpoints()
    with (
        Session(Opening(program, ends, maker.blob_path, model="net", about=lambda program: text_of(about))) as pipeline,
        streaming(pipeline, batches_for(program, 2)),
    ):
        summary = invoke_json("trace", "--cluster", cluster, "--seconds", "0.7", "--kernels", "2", "--output", output)
        wrong = invoke("trace", "--cluster", cluster, "--deployment", "other", code=1).stderr
        text = invoke("trace", "--cluster", cluster, "--seconds", "0.3", "--deployment", "net").stdout
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
