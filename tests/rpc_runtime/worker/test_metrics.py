"""Metrics of a worker as Prometheus reads them: they are the statistics, and no caller holds a worker up."""

import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.program.metrics import FAMILIES
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_lab import free_port
from tests.helpers.rpc_runtime.certificates import make_authority, worker_arguments
from tests.helpers.rpc_runtime.pipelines import over_grpc
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, batches_for, double
from tests.helpers.rpc_runtime.worker_process import Start, ready
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

COUNT = 12
NASTY = 'net "with" \\ and\nlines'


def samples(port: int, context: ssl.SSLContext | None = None) -> dict[tuple[str, ...], float]:
    """The metrics of this project on a port: (name, sorted labels…) → value."""
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=20, context=context) as reply:
        text = reply.read().decode()
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tvm_split")
    }


def test_metrics_are_the_statistics(start: Start, maker: ProgramMaker) -> None:
    ports = {name: free_port() for name in (A, B)}
    endpoints = {}
    for name, port in ports.items():
        process = start(
            "--json", "--name", name, "--metrics-listen", f"127.0.0.1:{port}", TVM_SPLIT_TOKEN="open-sesame"
        )
        endpoints[name] = WorkerEndpoint(name, ready(process), "open-sesame")
        assert samples(port) == {}
    x = maker.input("x")
    first = maker.stage("first", A, [x], double)
    program = maker.program([maker.stage("second", B, [first], double)])
    with Session(Opening(program, endpoints, maker.blob_path, links=over_grpc(program), model=NASTY)) as pipeline:
        list(pipeline.stream(batches_for(program, COUNT)))
        eventually(lambda: sum(stage.bytes_sent for stage in pipeline.statistics()) == 2 * COUNT * 64, "all is sent")
        stages = {stage.machine: stage for stage in pipeline.statistics()}
        seen = {name: samples(port) for name, port in ports.items()}
        own = (f"deployment={pipeline.deployment[:8]}", f"model={NASTY}")
        for name, stage in stages.items():

            def value(family: str, *labels: str, name: str = name) -> float:
                wanted = {family, *own, f"machine={name}", *labels}
                return sum(number for texts, number in seen[name].items() if wanted <= {*texts})

            of_stage = f"stage={stage.name}"
            assert value("tvm_split_stage_micro_batches_total", of_stage) == COUNT
            assert value("tvm_split_stage_compute_seconds_total", of_stage) == pytest.approx(stage.compute_seconds)
            assert value("tvm_split_link_sent_bytes_total") == stage.bytes_sent == COUNT * 64
            assert value("tvm_split_link_received_bytes_total") == stage.bytes_received
            assert value("tvm_split_link_send_seconds_total") == pytest.approx(stage.send_seconds)
            assert value("tvm_split_link_transfers_total") == COUNT
            assert value("tvm_split_weight_bytes") == pipeline.weight_bytes[name]
    eventually(lambda: samples(ports[A]) == {}, "the deployment has ended")


def test_names_follow_prometheus_conventions() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith("tvm_split_")
        assert (family.field == "seconds") == family.name.endswith("_seconds")
        assert (family.field == "size_bytes") == family.name.endswith("_bytes")


def test_silent_callers_take_no_place_of_others_for_long(start: Start) -> None:
    port = free_port()
    ready(start("--json", "--metrics-listen", f"127.0.0.1:{port}", TVM_SPLIT_TOKEN="abc"))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]

    def answers() -> bool:
        try:
            samples(port)
        except (OSError, urllib.error.URLError):
            return False
        return True

    eventually(answers, "silent callers are given up")
    for connection in silent:
        connection.close()


def test_over_tls(start: Start, tmp_path: Path) -> None:
    lab, port = make_authority(tmp_path), free_port()
    ready(start(*worker_arguments(lab.files("box"), mutual=True), "--metrics-listen", f"127.0.0.1:{port}"))
    context = ssl.create_default_context(cafile=str(lab.certificate))
    assert samples(port, context) == {}
    with pytest.raises((OSError, urllib.error.URLError)):
        samples(port)


def test_a_port_in_use_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start("--metrics-listen", address, TVM_SPLIT_TOKEN="abc")
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert f"cannot serve metrics on {address}" in errors
