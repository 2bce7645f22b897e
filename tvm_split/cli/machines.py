"""Options for the machines of a command: a location of `Cluster.at`, or worker processes on this host."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli.options import WrongUseError
from tvm_split.display.console import print_note

IN_PROCESS = "in-process"
DEFAULT_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """The options that choose the machines; by default worker processes on this host."""

    cluster: str | None = option(
        None,
        "A cluster file (YAML), or a location: at:HOST:PORT, tracker:HOST:PORT?key=box, kubernetes:LABELS, "
        "local:3?threads=2, or in-process, which calls the stages in turn without workers. Credentials of listed "
        "workers: ?token_file=F&tls_ca=F&tls_certificate=F&tls_key=F, or $TVM_SPLIT_TOKEN.",
        metavar="WHERE",
    )
    tracker: str | None = option(None, "Short for --cluster tracker:HOST:PORT.", metavar="HOST:PORT[?key=KEY]")
    kubernetes: str | None = option(None, "Short for --cluster kubernetes:LABELS.", metavar="LABELS[?namespace=NAME]")
    workers: int | None = option(None, "Instead of a cluster: so many worker processes on this host.", minimum=1)
    threads: int | None = option(
        None, "Threads of each worker process on this host (default: 1), or of this process.", minimum=1
    )

    def __post_init__(self) -> None:
        chosen = [f"--{name}" for name in ("cluster", "tracker", "kubernetes") if getattr(self, name)]
        if len(chosen) > 1:
            raise WrongUseError("give one of them", ", ".join(chosen))
        for name in ("workers", "threads"):
            if getattr(self, name) and chosen and self.cluster != IN_PROCESS:
                text = f"{self.words} chooses the machines; on this host: local:3?threads=2"
                raise WrongUseError(text, f"--{name}")

    @property
    def location(self) -> str:
        """The location of the machines, as for `Cluster.at`."""
        for name in ("tracker", "kubernetes"):
            if argument := getattr(self, name):
                return f"{name}:{argument}"
        if self.cluster not in (None, IN_PROCESS):
            return str(self.cluster)
        threads = f"?threads={self.threads}" if self.threads else ""
        return (
            f"{IN_PROCESS}:{self.workers or 1}{threads}"
            if self.cluster
            else f"local:{self.workers or DEFAULT_WORKERS}{threads}"
        )

    @property
    def is_in_process(self) -> bool:
        """Whether stages are called in this process, without workers."""
        return self.location.partition("?")[0].partition(":")[0] == IN_PROCESS

    @property
    def is_elsewhere(self) -> bool:
        """Whether ``cluster`` (other than in-process), ``tracker`` or ``kubernetes`` chooses the machines."""
        return not self.is_in_process and any((self.cluster, self.tracker, self.kubernetes))

    @property
    def words(self) -> str:
        """The command-line option that selects the same machines."""
        return f"--cluster {self.location}" if self.is_elsewhere else "--cluster FILE"

    def machines(self) -> tvm_split.Cluster:
        """Return the cluster of the machines, and note on stderr those that are left out.

        Raises:
            ClusterError: the cluster file is invalid, or there is no machine to deploy to.
        """
        location = self.location
        cluster = (tvm_split.Cluster.from_yaml if Path(location).exists() else tvm_split.Cluster.at)(location)
        for name, reason in cluster.left_out.items():
            print_note(f"left out: {name}, {reason}")
        return cluster
