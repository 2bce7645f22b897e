"""Where the viewers are, and what they are shown."""

import json
import os
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.rpc_lab import free_port
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.deployment.deployment import DeploymentStatistics
from tvm_split.observing.trace import Trace

FOLDER = Path(os.environ["VIEWERS"])
"""The folder that `make test-extra NAME=viewers` fills."""
COUNT = 25


class Run(NamedTuple):
    """A recorded stream of `COUNT` micro-batches, and the statistics of its deployment, which computed nothing else."""

    trace: Trace
    folder: Path
    statistics: DeploymentStatistics


NAMES = ("machine-a", "machine-b")
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "compose" / "prometheus.yaml"


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
        """Start a Prometheus with the configuration of ``deploy``; return its address."""
        address = f"127.0.0.1:{free_port()}"
        configuration = self.folder / "prometheus.yaml"
        configuration.write_text(CONFIGURATION.read_text())
        (self.folder / "targets.yaml").write_text(json.dumps([{"targets": targets}]))
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


def answers(address: str, query: str) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.loads(reply.read())["data"]["result"]
    except OSError:
        return []
