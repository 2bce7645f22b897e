"""A real Prometheus scrapes two workers and a client while a stream runs, and has the deployment's sums."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_split
from tests.helpers.rpc_lab import free_port
from tests.helpers.waiting import PATIENCE_SECONDS, eventually
from tests.viewers.lab import FOLDER

NAMES = ("machine-a", "machine-b")
CONFIGURATION = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: tvm-split
    static_configs: [{{targets: [{targets}]}}]
"""


class Lab:
    """Two workers with metrics, and how to start a Prometheus that scrapes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text("open-sesame\n")
        self.processes: list[subprocess.Popen[str]] = []
        self.metrics = [f"127.0.0.1:{free_port()}" for _ in NAMES]
        self.machines = []
        for name, metrics in zip(NAMES, self.metrics, strict=True):
            worker = self._start(
                *("tvm-split", "worker", "--name", name, "--token-file", str(self.token), "--json"),
                *("--metrics-listen", metrics),
            )
            assert worker.stdout is not None
            address = json.loads(worker.stdout.readline())["address"]
            self.machines.append({"name": name, "address": address, "token_file": str(self.token)})

    def _start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        self.processes.append(process)
        return process

    @property
    def cluster(self) -> Path:
        path = self.folder / "cluster.yaml"
        path.write_text(json.dumps({"machines": self.machines}))
        return path

    def prometheus(self, *targets: str) -> str:
        """Start a Prometheus; return its address."""
        address = f"127.0.0.1:{free_port()}"
        configuration = self.folder / "prometheus.yaml"
        configuration.write_text(CONFIGURATION.format(targets=", ".join(f'"{target}"' for target in targets)))
        self._start(
            *(str(FOLDER / "usr" / "bin" / "prometheus"), f"--config.file={configuration}"),
            *(f"--storage.tsdb.path={self.folder}/data", f"--web.listen-address={address}", "--log.level=error"),
        )
        return address

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def answers(address: str, query: str) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.loads(reply.read())["data"]["result"]
    except OSError:
        return []


def test_sums_are_the_statistics(lab: Lab, bundle: tvm_split.Bundle) -> None:
    x = np.zeros((1, 3, 224, 224), np.float32)
    with tvm_split.deploy(bundle, tvm_split.Cluster.from_yaml(lab.cluster)) as deployment:
        server = deployment.serve_metrics()
        address = lab.prometheus(*lab.metrics, str(server.address))
        eventually(lambda: len(answers(address, "up == 1")) == 3, "all are scraped")
        for _ in deployment.stream([(x,)] * 10):
            pass
        assert answers(address, "tvm_split_stage_micro_batches_total"), "scraped while the stream ran"
        for stage in deployment.stats().stages:
            query = f'max by (machine, stage) (tvm_split_stage_compute_seconds_total{{stage="{stage.name}"}})'

            def value(query: str = query) -> float:
                return max((float(answer["value"][1]) for answer in answers(address, query)), default=0.0)

            eventually(lambda: value() == pytest.approx(stage.compute_seconds), f"the seconds of {stage.name}")  # noqa: B023
        kinds = {answer["metric"]["kind"] for answer in answers(address, "tvm_split_period_seconds")}
        assert kinds == {"predicted", "measured"}
        both = answers(address, 'tvm_split_stage_micro_batches_total{machine="machine-a"}')
        assert len(both) == 2, "from the worker and from the client"
