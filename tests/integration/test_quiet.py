"""Standard error has this project's own words only: nothing that HiGHS, gRPC, TVM or torch log where all is well."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from PIL import Image

from tests.helpers.rpc_runtime.certificates import make_authority, worker_arguments
from tests.helpers.rpc_runtime.worker_process import ROOT, ready, start_worker
from tests.models.small_onnx_model import small_model

RECURRENT = """
import torch

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm = torch.nn.Embedding(20, 8), torch.nn.LSTM(8, 8, batch_first=True)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, tokens):
        return self.last(self.lstm(self.table(tokens))[0].flip(1)[:, [0, 1]])

def make():
    return Network().eval(), (torch.zeros(1, 6, dtype=torch.int64),)
"""
SCRIPT = """
import tvm_split
from recurrent import make

network, inputs = make()
split = {"one": ["table"], "two": ["last"]}
with tvm_split.compile_and_deploy(network, inputs, tvm_split.Cluster.at("lab.yaml"), split) as deployment:
    print(len(list(deployment.stream([inputs] * 5))))
"""
COMMAND = "from tvm_split.__main__ import main; main()"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start two workers with TLS; yield the folder of the cluster file. At the end, they have written nothing."""
    folder = tmp_path_factory.mktemp("lab")
    authority = make_authority(folder)
    files, machines = authority.files("box"), []
    processes = [
        start_worker(folder / name, f"--name={name}", *worker_arguments(files, mutual=True)) for name in ("one", "two")
    ]
    try:
        for name, process in zip(("one", "two"), processes, strict=True):
            address = ready(process)
            tls = {"ca": "lab.pem", "certificate": "box.pem", "key": "box.key"}
            machines.append({"name": name, "address": address, "tls": tls})
        (folder / "lab.yaml").write_text(json.dumps({"machines": machines}))
        (folder / "recurrent.py").write_text(RECURRENT)
        onnx.save(small_model(), folder / "small.onnx")
        yield folder
        for machine in machines:  # what is no handshake is refused, and gRPC would log it
            with socket.create_connection(machine["address"].rsplit(":", 1)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert stranger.recv(1) in (b"", b"\x15")
        for process in processes:
            process.terminate()
        assert [process.communicate(timeout=60)[1] for process in processes] == ["", ""]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def errors_of(folder: Path, code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "TVM_SPLIT_PROGRESS": "0"}
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    return ended.stderr


def test_a_network_of_torch_in_python(lab: Path) -> None:
    assert errors_of(lab, SCRIPT) == ""


@pytest.mark.parametrize(
    ("arguments", "own_words"),
    [
        ("plan recurrent:make --cluster lab.yaml --objective latency --output plan.json", "written to plan.json\n"),
        ("run small.onnx --cluster lab.yaml --random 3 --split one=conv_1 --split two=conv_2", ""),
        ("status --cluster lab.yaml", ""),
    ],
    ids=lambda text: text.split()[0] if text else "",
)
def test_commands(lab: Path, arguments: str, own_words: str) -> None:
    assert errors_of(lab, COMMAND, *arguments.split()) == own_words


EXAMPLES = {"images_to_npz.py": ("photos", "inputs.npz", "--batch", "2")}
"""The arguments with which each file of ``examples`` is run."""


@pytest.mark.parametrize("name", [path.name for path in (ROOT / "examples").glob("*.py")])
def test_examples(lab: Path, name: str) -> None:
    (lab / "photos").mkdir(exist_ok=True)
    for number in range(3):
        Image.new("RGB", (30, 40 + number)).save(lab / "photos" / f"{number}.png")
    assert errors_of(lab, (ROOT / "examples" / name).read_text(), *EXAMPLES[name]) == ""
