"""From the planning options, which all commands that plan have in common, to a cluster and a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_split.cli import options
from tvm_split.cli.found_machines import FoundMachines
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.shard_option import FORM, shard_of

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.model import Model
    from tvm_split.planner.plan import Plan
    from tvm_split.planner.problem import Problem
    from tvm_split.planner.request import PlanRequest

DEFAULT_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class ClusterOptions(FoundMachines):
    """Which machines the command line asks for."""

    workers: options.WorkersOption = None
    threads: options.ThreadsOption = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("token_file", "tls_ca", "tls_certificate", "tls_key"):
            if self.tracker is None and self.kubernetes is None and getattr(self, name):
                raise WrongUseError("belongs to --tracker or --kubernetes", _option(name))

    def machines(self) -> Cluster:
        """The machines; by default two worker processes on this host.

        Raises:
            WrongUseError: options that contradict each other.
            ClusterError: the cluster file does not fit, or there is no machine to deploy to.
        """
        from tvm_split.cluster.cluster import Cluster

        found = self.found()
        if found is None:
            return Cluster.local(self.workers or DEFAULT_WORKERS, self.threads or 1)
        if self.workers or self.threads:
            raise WrongUseError("every worker was started with its own", "--workers" if self.workers else "--threads")
        return found


@dataclasses.dataclass(frozen=True)
class ClusterOrProcessOptions(ClusterOptions):
    """As `ClusterOptions`, or no workers at all."""

    in_process: options.InProcessOption = False

    def machines(self) -> Cluster:
        from tvm_split.cluster.cluster import Cluster

        if self.in_process and self.is_given:
            raise WrongUseError("other machines are not in this process", "--in-process")
        if self.in_process:
            return Cluster.in_process(self.workers or 1, self.threads)
        return super().machines()


def _value(metavar: str | None, help: str, minimum: float | None = None) -> Any:
    return typer.Option(metavar=metavar, help=help, min=minimum, rich_help_panel="Planning")


def _flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Planning")


SEARCHING = (
    "no_shards",
    "pin",
    "keep_off",
    "replicas",
    "maximum_machines",
    "maximum_latency",
    "minimum_throughput",
    "time_limit",
)
"""The options that say nothing where the user splits a model."""
MEASURING = ("estimate", "refresh")
"""Those that say something of such a split only if it is to be predicted."""
SPLITTING = ("split", "split_from_model", "configuration", "shard")
PLANNING = (*SPLITTING, "predict", "stages", "objective", "allow_lossy", "precision", *SEARCHING, *MEASURING)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """How the command line wants a model to be planned: `tvm_split.planner.request.PlanRequest` in options."""

    split: Annotated[
        list[str] | None,
        _value("MACHINE=LAYER,LAYER", "Layers for a machine; a name takes all layers below it. Repeatable."),
    ] = None
    split_from_model: Annotated[
        bool, _flag("--split-from-model", "Split as the ONNX file's own annotations say; devices are machines.")
    ] = False
    configuration: Annotated[
        str | None, _value("NAME", "Which device configuration of the ONNX file, if it has several.")
    ] = None
    shard: Annotated[
        list[str] | None,
        _value(
            FORM,
            "Layers that machines compute together on each input, by rows, columns, channels, heads or batch; "
            "--split is for the others. Repeatable.",
        ),
    ] = None
    no_shards: Annotated[
        bool, _flag("--no-shards", "Leave out plans in which machines compute layers together on each input.")
    ] = False
    predict: Annotated[
        bool, _flag("--predict", "Say what a split by hand will do, too: its kernels and links are measured.")
    ] = False
    stages: Annotated[int | None, _value(None, "Exactly so many stages.", 1)] = None
    objective: Annotated[options.Objective, _value(None, "What the plan is made for.")] = "throughput"
    pin: Annotated[
        list[str] | None, _value("LAYER=MACHINE", "Keep a layer, or all below that name, there. Repeatable.")
    ] = None
    keep_off: Annotated[
        list[str] | None, _value("LAYER=MACHINE", "Keep a layer, or all below that name, off. Repeatable.")
    ] = None
    replicas: Annotated[bool, _flag("--replicas", "A stage may be dealt out over machines that take turns.")] = False
    maximum_machines: Annotated[int | None, _value(None, "Use so many machines at most.", 1)] = None
    maximum_latency: Annotated[float | None, _value("SECONDS", "One input alone may take so long at most.", 1e-9)] = (
        None
    )
    minimum_throughput: Annotated[float | None, _value("PER_SECOND", "Micro-batches a second, at least.", 1e-9)] = None
    estimate: Annotated[bool, _flag("--estimate", "Measure nothing: plan with estimates.")] = False
    refresh: Annotated[bool, _flag("--refresh", "Measure anew what was measured before.")] = False
    time_limit: Annotated[
        float | None, _value("SECONDS", "Search so long, then take the best so far (default: 10).", 0.1)
    ] = None
    allow_lossy: Annotated[
        float | None,
        _value("SHARE", "Links with codec: auto may change outputs by such a share of their range, say 0.01.", 0.0),
    ] = None
    precision: Annotated[
        options.Precision, _value(None, "What convolutions and products take their operands in; they add in float32.")
    ] = "float32"
    database: options.DatabaseOption = None

    def __post_init__(self) -> None:
        if self.split and self.split_from_model:
            raise WrongUseError("give one of them", "--split, --split-from-model")
        if self.configuration is not None and not self.split_from_model:
            raise WrongUseError("belongs to --split-from-model", "--configuration")
        if self.estimate and self.refresh:
            raise WrongUseError("an estimate measures nothing", "--estimate, --refresh")
        if self.is_split:
            self.require_none("a split by hand leaves nothing to search", SEARCHING)
            if not self.predict:
                self.require_none("a split by hand is measured only with --predict", MEASURING)
        elif self.predict:
            raise WrongUseError("belongs to --split or --shard; what is searched for is predicted", "--predict")

    @property
    def is_split(self) -> bool:
        """Whether it says which layers go where."""
        return bool(self.split) or self.split_from_model or bool(self.shard)

    def require_none(self, why: str, names: Collection[str] = ()) -> None:
        """Raise a `WrongUseError` if an option was given, of all or those of ``names``."""
        for field in dataclasses.fields(self):
            if (not names or field.name in names) and getattr(self, field.name) not in (field.default, []):
                raise WrongUseError(why, _option(field.name))

    def require_possible(self, source: str) -> None:
        """Raise a `WrongUseError` for what cannot be had of the model that ``source`` names."""
        if self.split_from_model:
            require_onnx(source, "--split-from-model")

    def request(self, source: str, model: Model, cluster: Cluster) -> PlanRequest:
        """What is asked of the planner for the ``model`` that was loaded from ``source``.

        Raises:
            WrongUseError: an option cannot be read.
            PlanError: the model's annotations make no split, or demands that there cannot be.
        """
        from tvm_split.planner.request import PlanRequest
        from tvm_split.planner.search import DEFAULT_TIME_LIMIT_SECONDS

        split = self._split_of_model(source, model, cluster) if self.split_from_model else self._split_by_hand()
        return PlanRequest(
            objective=self.objective,
            stages=self.stages,
            split=split,
            shards=tuple(shard_of(text, model.layer_names) for text in self.shard or ()),
            consider_shards=not self.no_shards,
            predict=self.predict,
            pins=tuple(_pairs(self.pin or (), "--pin")),
            kept_off=tuple(_pairs(self.keep_off or (), "--keep-off")),
            replicas=self.replicas,
            maximum_machines=self.maximum_machines,
            maximum_period_seconds=1.0 / self.minimum_throughput if self.minimum_throughput else math.inf,
            maximum_latency_seconds=self.maximum_latency or math.inf,
            measure=not self.estimate,
            refresh=self.refresh,
            database=self.database,
            allow_lossy=self.allow_lossy or 0.0,
            precision=self.precision,
            time_limit_seconds=self.time_limit or DEFAULT_TIME_LIMIT_SECONDS,
        )

    def plan(
        self, source: str, model: Model, cluster: Cluster, on_problem: Callable[[Problem], None] | None = None
    ) -> Plan:
        """The plan, with a bar on stderr while it is made."""
        from tvm_split.planning import plan_as_requested

        return plan_as_requested(model, cluster, self.request(source, model, cluster), on_problem=on_problem)

    def _split_of_model(self, source: str, model: Model, cluster: Cluster) -> dict[str, list[str]]:
        """As the annotations of the ONNX file say; devices without names are the cluster's machines, in order."""
        from tvm_split.frontends.onnx.annotations import read_model, split_from_annotations

        self.require_possible(source)
        return split_from_annotations(
            read_model(source), model.layer_names, configuration=self.configuration, machines=cluster.machine_names
        )

    def _split_by_hand(self) -> dict[str, list[str]] | None:
        layers: dict[str, list[str]] = {}
        for text in self.split or ():
            machine, separator, names = text.partition("=")
            chosen = [name.strip() for name in names.split(",") if name.strip()]
            if not (machine and separator and chosen):
                raise WrongUseError(f"{text!r} is not MACHINE=LAYER,LAYER", "--split")
            layers.setdefault(machine, []).extend(chosen)
        return layers or None


def require_onnx(source: str, option: str) -> None:
    """Raise a `WrongUseError` for a model that cannot be annotated."""
    if Path(source).suffix.lower() != ".onnx":
        raise WrongUseError(f"only ONNX files have annotations of devices; {source!r} is none", option)


def _pairs(given: Sequence[str], option: str) -> Iterator[tuple[str, str]]:
    for text in given:
        layer, separator, machine = text.rpartition("=")
        if not (layer and separator and machine):
            raise WrongUseError(f"{text!r} is not LAYER=MACHINE", option)
        yield layer, machine


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
