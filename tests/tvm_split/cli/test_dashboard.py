"""``tvm-split dashboard`` and ``report``."""

import json
import signal
import urllib.request

import numpy as np

import tvm_split
from tests.helpers.labs import streaming, write_lab
from tests.helpers.traces_of_runs import two_machines
from tests.helpers.waiting import eventually
from tests.models.small_onnx_model import INPUT_SHAPE

NAMES = ("machine-a", "machine-b")


def page_at(url):
    with urllib.request.urlopen(f"{url}page.json", timeout=30) as reply:
        return json.loads(reply.read())


def test_what_runs_is_found(bundle, start_process, three_workers, tmp_path):
    path = write_lab(tmp_path, {name: three_workers.endpoints()[name] for name in NAMES})
    dashboard = start_process("dashboard", "--cluster", path, "--listen", "127.0.0.1:0")
    url = dashboard.stdout.readline().split()[-1]
    waiting = page_at(url)
    assert waiting["state"] == "waiting"
    assert [machine["machine"] for machine in waiting["machines"]] == list(NAMES)
    with (
        tvm_split.deploy(bundle, tvm_split.Cluster.from_yaml(path)) as deployment,
        streaming(deployment, [np.zeros(INPUT_SHAPE, np.float32)]),
    ):
        eventually(lambda: page_at(url)["state"] == "running", "it is found")
        page = page_at(url)
        assert page["model"] == deployment.bundle.model
        assert page["machines"][0]["stages"][0][1] == ["conv_1", "relu_1"]
    eventually(lambda: page_at(url)["state"] == "ended", "its end is shown")
    dashboard.send_signal(signal.SIGINT)
    assert dashboard.wait(20) == 130


def test_wrong_use(invoke, tmp_path):
    assert "--cluster" in invoke("dashboard", code=2).stderr
    wrong = invoke("dashboard", "--cluster", "at:127.0.0.1:9", "--listen", "0.0.0.0:0", code=2).stderr
    assert "--insecure" in wrong


def test_a_saved_trace_becomes_a_page(invoke, invoke_json, tmp_path):
    saved = tmp_path / "run.json"
    two_machines().save(saved)
    summary = invoke_json("report", saved, "--output", tmp_path / "run.html")
    assert summary["limiting"] == ["machine-b"]
    assert "page-values" in (tmp_path / "run.html").read_text()
    assert "bubble" in invoke("report", saved).stdout
    saved.write_text(saved.read_text()[:-20])
    assert "run.json" in invoke("report", saved, code=1).stderr
    invoke("report", tmp_path / "run.html", code=1)
    assert ".pdf" in invoke("report", saved, "--output", tmp_path / "run.pdf", code=2).stderr
