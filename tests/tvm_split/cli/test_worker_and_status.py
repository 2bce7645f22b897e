import getpass
import json
import os
import platform
import socket
import sys

import numpy as np
import pytest

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.errors import WorkerError
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import add, batches_for, double
from tests.helpers.waiting import PATIENCE_SECONDS

TOKEN = "open-sesame"
FOREIGN = {"kind": "llvm", "mtriple": "aarch64-linux-gnu" if platform.machine() == "x86_64" else "x86_64-linux-gnu"}
"""A target whose code this host cannot execute."""


@pytest.fixture
def worker(start_process, tmp_path):
    """A running worker with a token: its process and address."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    process = start_process(
        *("worker", "--listen", "127.0.0.1:0", "--name", "box", "--cache", tmp_path / "cache"),
        *("--token-file", tmp_path / "token", "--json"),
    )
    ready = json.loads(process.stdout.readline())
    assert ready["name"] == "box"
    return process, ready["address"]


def test_status(invoke, invoke_json, worker, tmp_path):
    process, address = worker
    (status,) = invoke_json("status", "--cluster", f"at:{address}?token_file={tmp_path}/token")["workers"]
    assert (status["reachable"], status["worker"], status["process_id"]) == (True, "box", process.pid)
    assert status["cores"] >= 1
    assert status["deployments"] == []
    assert "token" in invoke("status", "--cluster", f"at:{address}", code=1).stderr
    machines = [
        {"name": "near", "address": address, "token_file": "token"},
        {"name": "far", "address": "127.0.0.1:9", "token_file": "token"},
    ]
    (tmp_path / "cluster.yaml").write_text(json.dumps({"machines": machines}))
    result = invoke("status", "--cluster", tmp_path / "cluster.yaml", "--timeout", "3", code=1)
    assert "near" in result.stdout
    assert result.stdout.count("cannot be used") == 1
    assert result.stderr.count("127.0.0.1:9") == 1


@pytest.mark.parametrize("location", ["FILE", "at:ADDRESS"])
def test_a_frozen_worker_takes_its_timeout_and_nothing_more(start_process, tmp_path, location):
    """TVM, which takes seconds to load, is needed only for what a worker has answered."""
    (tmp_path / "tvm.py").write_text("import time\nwhile True: time.sleep(1)")
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        path = cluster_file(tmp_path, {"name": "box", "address": address})
        (tmp_path / "token").write_text(TOKEN)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
        where = location.replace("FILE", str(path)).replace("ADDRESS", address)
        process = start_process("status", "--cluster", where, "--timeout", "0.5", env=environment)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert f"at {address}: it did not answer in time" in errors


def test_a_refusal_is_no_silence_and_advises_what_fits_the_call(invoke, invoke_json, worker, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("wrong")
    of_file = cluster_file(tmp_path, {"name": "box", "address": worker[1]})
    for location, environment, advice in (
        (of_file, "", "the one from its token_file"),
        (f"at:{worker[1]}?token_file={tmp_path}/token", "", "the one from its token_file"),
        (f"at:{worker[1]}", "guessed", "the one from TVM_SPLIT_TOKEN"),
        (f"at:{worker[1]}", "", "none was given; name its file as token_file"),
    ):
        monkeypatch.setenv("TVM_SPLIT_TOKEN", environment)
        result = invoke("status", "--cluster", location, code=1)
        assert "it refused the call" in result.stderr
        assert advice in result.stderr
        assert "--token-file" not in result.stderr
        assert "answer" not in result.output
        (row,) = invoke_json("status", "--cluster", location, code=1)["workers"]
        assert row["reason"].startswith("it refused the call")


DEAD = [{"name": name, "address": f"127.0.0.1:{port}"} for name, port in (("desk", 9), ("box", 11))]
LLVM = {"target": {"kind": "llvm"}}


@pytest.mark.parametrize(
    ("command", "more"),
    [
        *((command, {}) for command in ("plan", "run", "bench", "profile", "tune", "compile --output bundle")),
        *((f"plan {options}", {}) for options in ("--batches 1,2", "--estimate", "--split box=conv_1")),
        ("plan", LLVM),
        ("plan --split box=conv_1 --predict", LLVM),
        ("run --estimate", LLVM),
        ("run --split box=conv_1", LLVM),
    ],
)
def test_dead_workers_are_told_before_the_model_is_read(invoke, tmp_path, command, more):
    (tmp_path / "token").write_text(TOKEN)
    path = cluster_file(tmp_path, *({**machine, **more} for machine in DEAD))
    name, *options = command.replace("bundle", str(tmp_path / "bundle")).split()
    error = invoke(name, tmp_path / "missing.onnx", "--cluster", path, *options, code=1).stderr
    assert "127.0.0.1:11 cannot be reached" in error


@pytest.mark.parametrize("command", ["run", "bench", "deploy"])
@pytest.mark.parametrize("renaming", [[], ["--rename", "box=desk"]])
def test_dead_workers_are_told_before_a_bundle_is_read(invoke, tmp_path, command, renaming):
    """A manifest that names machines is not a bundle yet; workers of other machines are not asked."""
    (tmp_path / "token").write_text(TOKEN)
    stages = {"program": {"stages": [{"machine": "box"}]}}
    (tmp_path / "manifest.json").write_text(json.dumps(stages))
    path = cluster_file(tmp_path, *DEAD)
    error = invoke(command, tmp_path, "--cluster", path, *renaming, code=1).stderr
    asked, other = ("127.0.0.1:9", "127.0.0.1:11") if renaming else ("127.0.0.1:11", "127.0.0.1:9")
    assert f"{asked} cannot be reached" in error
    assert other not in error


@pytest.mark.parametrize("options", ["--estimate", "--split box=conv_1"])
def test_workers_that_a_plan_does_without_are_not_asked(invoke, tmp_path, options):
    (tmp_path / "token").write_text(TOKEN)
    path = cluster_file(tmp_path, *({**machine, **LLVM} for machine in DEAD))
    result = invoke("plan", tmp_path / "missing.onnx", "--cluster", path, *options.split(), code=2)
    assert "there is no file" in result.stderr


def test_status_says_what_a_worker_holds_and_whose_it_is(invoke, invoke_json, worker, tmp_path):
    maker = ProgramMaker(tmp_path / "blobs")
    value = maker.stage("one", "box", [maker.input("x")], add, weights={"w": np.ones((2, 8), np.float32)})
    program, endpoint = maker.program([value]), WorkerEndpoint("box", worker[1], TOKEN)
    command = ("status", "--cluster", f"at:{worker[1]}?token_file={tmp_path}/token")
    with Session(Opening(program, {"box": endpoint}, maker.blob_path, model="bird\x1bcage")) as session:
        session.run(batches_for(program, 1)[0])
        ((held,),) = [row["deployments"] for row in invoke_json(*command)["workers"]]
        assert (held["model"], held["weight_bytes"]) == (r"bird\x1bcage", 64)
        assert held["owner"] == f"{getpass.getuser()}@{socket.gethostname()}"
        assert held["micro_batches_per_second"] > 0
        text = " ".join(invoke(*command).stdout.split())
        assert rf"holds bird\x1bcage of {held['owner']} (64 B of weights, " in text


def test_a_worker_is_drained(invoke, invoke_json, worker, tmp_path):
    maker = ProgramMaker(tmp_path / "blobs")
    program = maker.program([maker.stage("one", "box", [maker.input("x")], double)])
    endpoint, where = WorkerEndpoint("box", worker[1], TOKEN), f"at:{worker[1]}?token_file={tmp_path}/token"
    command = ("drain", "box", "--cluster", where)
    with Session(Opening(program, {"box": endpoint}, maker.blob_path, model="bird")) as session:
        result = invoke_json(*command, "--timeout", "0", code=1)
        assert (result["machine"], result["draining"]) == ("box", True)
        (left,) = result["left"]
        assert left.startswith(f"bird of {getpass.getuser()}@{socket.gethostname()}, whose client does not move it")
        assert f"left on box: {left}" in invoke(*command, "--timeout", "0", code=1).stderr
        session.run(batches_for(program, 1)[0])
        assert "draining" in invoke("status", "--cluster", where).stdout
    assert "nothing runs there" in invoke(*command).stdout
    with pytest.raises(WorkerError, match=r"'box' is drained .* `tvm-split drain box --undo`"):
        Session(Opening(program, {"box": endpoint}, maker.blob_path))
    assert "takes deployments again" in invoke(*command, "--undo").stdout
    assert not invoke_json("status", "--cluster", where)["workers"][0]["draining"]
    Session(Opening(program, {"box": endpoint}, maker.blob_path)).close()
    assert "no machine is named 'bax'; there are box" in invoke("drain", "bax", "--cluster", where, code=2).stderr


def test_status_says_what_carries_the_links(invoke, invoke_json, start_process, tmp_path):
    machines = []
    for name in ("near", "next", "own"):
        process = start_process("worker", "--name", name, "--cache", tmp_path / name, "--json")
        machines.append({"name": name, "address": json.loads(process.stdout.readline())["address"]})
    links = [{"from": "near", "to": "next", "transport": "grpc"}]
    links += [{"from": "own", "to": "near", "address": "127.0.0.1:9"}]
    links += [{"from": "next", "to": "own"}]
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"machines": machines, "links": links}))
    rows = invoke_json("status", "--cluster", path)["links"]
    carried = {(row["source"], row["destination"]): row["transport"] for row in rows}
    assert len(carried) == len(rows) == 12
    not_shm = {ends: how for ends, how in carried.items() if how != "shm"}
    assert not_shm == {("near", "next"): "grpc", ("next", "near"): "grpc", ("own", "near"): "grpc"}
    text = " ".join(invoke("status", "--cluster", path).stdout.split())
    assert "Links over gRPC: near ↔ next, own → near" in text
    shared = "client ↔ near, client ↔ next, client ↔ own, near → own, next ↔ own"
    assert f"Links over shared memory: {shared}" in text


def test_a_tracker_instead_of_a_file(invoke, onnx_path, bundle, tmp_path):
    (tmp_path / "cluster.yaml").write_text('{"machines": [{"name": "a", "address": "127.0.0.1:9"}]}')
    file = ("--cluster", tmp_path / "cluster.yaml")
    for command in (("plan", onnx_path), ("run", bundle), ("deploy", bundle), ("profile", onnx_path)):
        assert "--tracker" in invoke(*command, *file, "--tracker", "127.0.0.1:9", code=2).stderr
        result = invoke(*command, "--tracker", "127.0.0.1:9", code=1)
        assert "no tracker can be reached at 127.0.0.1:9" in result.stderr
    assert "no tracker can be reached" in invoke("status", "--tracker", "127.0.0.1:9", code=1).stderr


def cluster_file(folder, *machines):
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({"machines": [{"token_file": "token", **machine} for machine in machines]}))
    return path


def test_a_worker_that_is_not_what_the_file_says(invoke, worker, onnx_path, tmp_path):
    for entry, message in (
        ({"name": "desk"}, "the worker that answers for machine 'desk' is 'box'"),
        ({"name": "box", "threads": 8}, "machine 'box' is described with 8 threads, its worker uses 1"),
        ({"name": "box", "target": FOREIGN}, f"machine 'box' is described with the target {FOREIGN}, and its worker's"),
    ):
        path = cluster_file(tmp_path, {**entry, "address": worker[1]})
        result = invoke("status", "--cluster", path, code=1)
        assert message in result.stderr
        assert "process" in result.stdout
        for command in (["plan", onnx_path], ["compile", onnx_path, "--output", tmp_path / "bundle"]):
            assert message in invoke(*command, "--cluster", path, "--maximum-machines", "1", code=2).stderr
            assert message in invoke(*command, "--cluster", path, "--split", f"{entry['name']}=conv_1", code=2).stderr
        assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"address": "127.0.0.1:7001"}, "'box' and 'desk' have the same address 127.0.0.1:7001"),
        (
            {"address": "127.0.0.1:9", "target": {"kind": "llvm", "mcpu": "znver99"}},
            "cluster.yaml:1: machine 'desk': LLVM knows no CPU 'znver99'",
        ),
    ],
)
def test_what_a_cluster_file_cannot_mean(invoke, onnx_path, tmp_path, entry, message):
    (tmp_path / "token").write_text(TOKEN)
    path = cluster_file(tmp_path, {"name": "box", "address": "127.0.0.1:7001", **LLVM}, {"name": "desk", **entry})
    for command in (["status"], ["plan", onnx_path, "--split", "box=conv_1"], ["plan", onnx_path, "--estimate"]):
        error = invoke(*command, "--cluster", path, code=2).stderr
        assert message in error
        assert len(error.splitlines()) == 1
