"""Options for the machines of a command: a location of `Cluster.at`, a tracker, Kubernetes, or this host."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import tvm_split
from rpc_runtime.option import option
from rpc_runtime.wire.security import TlsFiles, token_from
from rpc_runtime.wire.tracker import TrackerAddress
from tvm_split.cli.options import WrongUseError
from tvm_split.display.console import print_note

IN_PROCESS = "in-process"
DEFAULT_WORKERS = 2
FOUND = ("tracker", "kubernetes")
ACCESS = ("token_file", "tls_ca", "tls_certificate", "tls_key")
OF_FOUND = {"key": "tracker", "namespace": "kubernetes"}


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """The options that choose the machines; by default worker processes on this host."""

    cluster: str | None = option(
        None,
        "A cluster file (YAML) that names machines with running workers, or a location like local:3?threads=2 or "
        f"tracker:HOST:PORT. {IN_PROCESS}: no workers, the stages are called in turn in this process.",
        metavar="WHERE",
    )
    tracker: str | None = option(
        None, "Instead of a cluster file: the workers that a TVM RPC tracker lists now.", metavar="HOST:PORT"
    )
    key: str | None = option(None, "With --tracker: those of this key (default: of every key).")
    kubernetes: str | None = option(None, "Instead of a file: the ready pods that have these labels.", metavar="LABELS")
    namespace: str | None = option(None, "With --kubernetes: their namespace (default: kubectl's own).")
    token_file: Path | None = option(None, "Of workers not in a file: their secret (default: $TVM_SPLIT_TOKEN).")
    tls_ca: Path | None = option(None, "Of workers not in a file: use TLS, trust this authority.", metavar="PEM")
    tls_certificate: Path | None = option(None, "With --tls-ca: prove who you are, too.", metavar="PEM")
    tls_key: Path | None = option(None, "The key of --tls-certificate.", metavar="PEM")
    workers: int | None = option(None, "Instead of a cluster: so many worker processes on this host.", minimum=1)
    threads: int | None = option(
        None, "Threads of each worker process on this host (default: 1), or of this process.", minimum=1
    )

    def __post_init__(self) -> None:
        ways = [name for name in ("cluster", *FOUND) if getattr(self, name)]
        if len(ways) > 1:
            raise WrongUseError("give one of them", ", ".join(map(_option, ways)))
        for name, way in OF_FOUND.items():
            if getattr(self, name) and way not in ways:
                raise WrongUseError(f"belongs to {_option(way)}", _option(name))
        for name in ("workers", "threads"):
            if getattr(self, name) and ways and self.cluster != IN_PROCESS:
                place = f"--cluster {self.cluster}" if self.cluster else _option(ways[0])
                raise WrongUseError(f"{place} chooses the machines; on this host: local:3?threads=2", _option(name))

    @property
    def is_in_process(self) -> bool:
        """Whether stages are called in this process, without workers."""
        return bool(self.cluster) and re.split("[:?]", self.cluster or "")[0] == IN_PROCESS

    @property
    def is_elsewhere(self) -> bool:
        """Whether ``cluster`` (other than in-process), ``tracker`` or ``kubernetes`` chooses the machines."""
        return not self.is_in_process and any((self.cluster, self.tracker, self.kubernetes))

    @property
    def words(self) -> str:
        """The command-line options that select the same machines."""
        given = [
            f"{_option(name)} {getattr(self, name)}"
            for name in ("cluster", "tracker", "key", "kubernetes", "namespace")
            if getattr(self, name)
        ]
        return " ".join(given) or "--cluster FILE"

    def machines(self) -> tvm_split.Cluster:
        """Return the cluster of the machines, and note on stderr those that are left out.

        Raises:
            ClusterError: the cluster file is invalid, or there is no machine to deploy to.
        """
        for name in ACCESS:
            if getattr(self, name) and not (self.tracker or self.kubernetes):
                raise WrongUseError("belongs to --tracker or --kubernetes; a cluster file has its own", _option(name))
        if self.cluster == IN_PROCESS:
            return tvm_split.Cluster.in_process(self.workers or 1, self.threads)
        if self.tracker:
            address = TrackerAddress.parse(self.tracker)
            found = tvm_split.Cluster.from_tracker(address.host, address.port, self.key, token=self.token, tls=self.tls)
        elif self.kubernetes:
            found = tvm_split.Cluster.from_kubernetes(
                self.kubernetes, namespace=self.namespace, token=self.token, tls=self.tls
            )
        elif self.cluster:
            is_file = Path(self.cluster).exists()
            found = tvm_split.Cluster.from_yaml(self.cluster) if is_file else tvm_split.Cluster.at(self.cluster)
        else:
            found = tvm_split.Cluster.local(self.workers or DEFAULT_WORKERS, self.threads or 1)
        for name, reason in found.left_out.items():
            print_note(f"left out: {name}, {reason}")
        return found

    @property
    def token(self) -> str | None:
        """The token of workers that a tracker or Kubernetes lists."""
        found = token_from(self.token_file)
        return None if found is None else found.text

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files for workers that a tracker or Kubernetes lists."""
        if not (self.tls_ca or self.tls_certificate or self.tls_key):
            return None
        return TlsFiles(self.tls_ca, self.tls_certificate, self.tls_key)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
