"""From the planning options to a cluster and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tvm_split.cli.wrong_use import WrongUseError
from tvm_split.progress import step_progress

if TYPE_CHECKING:
    from tvm_split.cli.annotations import AnnotatedModel
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.model import Model
    from tvm_split.planner.plan import Plan

DEFAULT_WORKERS = 2


@dataclass(frozen=True)
class ClusterRequest:
    """Which machines the command line asks for."""

    file: Path | None = None
    workers: int | None = None
    threads: int | None = None
    in_process: bool = False

    @property
    def is_given(self) -> bool:
        return self.file is not None or self.workers is not None or self.in_process

    def cluster(self) -> Cluster:
        """The machines; by default two worker processes on this host.

        Raises:
            WrongUseError: options that contradict each other.
            ClusterError: the cluster file does not fit.
        """
        from tvm_split.cluster.cluster import Cluster

        if self.file is not None:
            for given, option in ((self.workers, "--workers"), (self.threads, "--threads")):
                if given is not None:
                    raise WrongUseError("a cluster file says this for each machine", option)
            if self.in_process:
                raise WrongUseError("a cluster file names machines elsewhere", "--in-process")
            return Cluster.from_yaml(self.file)
        if self.in_process:
            return Cluster.in_process(self.workers or 1, self.threads)
        return Cluster.local(self.workers or DEFAULT_WORKERS, self.threads or 1)


@dataclass(frozen=True)
class PlanRequest:
    """How the command line wants a model to be split."""

    split: Sequence[str] = ()
    stages: int | None = None
    objective: Literal["throughput", "latency"] = "throughput"
    annotated: AnnotatedModel | None = None

    def __post_init__(self) -> None:
        if self.split and self.annotated is not None:
            raise WrongUseError("give one of them", "--split, --split-from-model")

    @property
    def is_given(self) -> bool:
        return self.is_split or self.stages is not None

    @property
    def is_split(self) -> bool:
        """Whether it says which layers go where."""
        return bool(self.split) or self.annotated is not None

    def plan(self, model: Model, cluster: Cluster) -> Plan:
        """Measured and searched where no split is given, with a bar on stderr."""
        from tvm_split.planning import plan

        split = self._split() if self.annotated is None else self.annotated.split(model, cluster)
        with step_progress("planning") as report:
            return plan(model, cluster, objective=self.objective, stages=self.stages, split=split, on_progress=report)

    def _split(self) -> dict[str, list[str]] | None:
        layers: dict[str, list[str]] = {}
        for text in self.split:
            machine, separator, names = text.partition("=")
            chosen = [name.strip() for name in names.split(",") if name.strip()]
            if not (machine and separator and chosen):
                raise WrongUseError(f"{text!r} is not MACHINE=LAYER,LAYER", "--split")
            layers.setdefault(machine, []).extend(chosen)
        return layers or None
