"""The request to the planner, shared by Python calls, the command line and plan files."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from rpc_runtime.option import option, options
from tvm_split.errors import PlanError
from tvm_split.parameters import Number, Seconds, Share, Whole
from tvm_split.placement.by_hand import Shard, Split
from tvm_split.placement.problem import Objective, Precision
from tvm_split.placement.profile import ClusterProfile
from tvm_split.units import ShownFields, few_lines
from tvm_split.values import text_of

SOURCE = "source"
"""Selects the split that is annotated in the model's file; ``source:NAME`` selects one of several."""
SPLIT_FORM = "{'machine-a': ['first', 'second'], 'machine-b': ['third']}"
SPLITTING = ("split", "shards")
"""The fields with which the user, not the planner, decides the split."""
DEMANDS = ("pin", "keep_off", "replicas", "maximum_machines", "maximum_latency_seconds", "minimum_throughput")
"""The fields that only a search can satisfy."""
PLANNING_SECONDS = 30.0
SEARCHING = ("auto_shards", *DEMANDS, "strategy", "time_limit_seconds")
"""The fields that have no effect if the user decides the split."""


class RequestError(PlanError):
    """Raised for invalid or contradictory fields of a request; ``fields`` names them, ``problem`` says why."""

    def __init__(self, problem: str, *fields: str) -> None:
        super().__init__(f"{', '.join(fields)}: {problem}" if fields else problem)
        self.problem = problem
        self.fields = fields


def _split(value: Any) -> dict[str, tuple[str, ...]] | str:
    """Return layers by machine from a mapping or texts MACHINE=LAYER,LAYER; return a choice by `SOURCE` unchanged."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and len(texts) == 1 and str(texts[0]).partition(":")[0] == SOURCE:
        return str(texts[0])
    if not isinstance(texts, Iterable | None):
        raise RequestError(f"{value!r} is no split; give layers by machine, {SPLIT_FORM}", "split")
    layers: dict[str, list[str]] = {}
    for machine, names in value.items() if isinstance(value, Mapping) else map(_machine_and_layers, texts or ()):
        listed = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
        if not all(isinstance(name, str | int) for name in listed):  # layers of a torch.nn.Sequential are numbers
            raise RequestError(f"machine {machine!r} has {names!r:.80}; give a list of layer names", "split")
        if not listed:
            raise RequestError(f"machine {machine!r} has no layers; leave it out, or name a layer for it", "split")
        layers.setdefault(machine, []).extend(map(str, listed))
    return {machine: tuple(names) for machine, names in layers.items()}


def split_by_position(split: Any, machine_names: Sequence[str]) -> Any:
    """Return a split that is a list of layers for each machine as a mapping; any other split as it is."""
    if not isinstance(split, list | tuple) or not split or any(isinstance(layers, str) for layers in split):
        return split
    if len(split) > len(machine_names):
        counts = f"{len(split)} lists of layers, and the cluster has {len(machine_names)} machines"
        raise RequestError(f"these are {counts}; give one list for each machine", "split")
    return dict(zip(machine_names, split, strict=False))


def _split_content(split: Split | str) -> dict[str, list[str]] | str:
    """A split as a value for JSON."""
    return split if isinstance(split, str) else {machine: list(layers) for machine, layers in split.items()}


def _machine_and_layers(text: Any) -> tuple[str, list[str]]:
    machine, separator, names = str(text).partition("=")
    layers = [name.strip() for name in names.split(",") if name.strip()]
    if not (machine and separator and layers):
        raise RequestError(f"{text!r} is not MACHINE=LAYER,LAYER; in Python give {SPLIT_FORM}", "split")
    return machine, layers


def _machines_of_layers(value: Any, field: str) -> Any:
    """Machines by layer, from texts LAYER=MACHINE or from a mapping, in which a single machine becomes a list."""
    if isinstance(value, Mapping):
        return {str(layer): _machine_names(layer, machines, field) for layer, machines in value.items()}
    if not isinstance(value, list | tuple | str | None):
        raise RequestError(f"{value!r} is not machines of layers; give them by layer, {{'head': 'machine-a'}}", field)
    machines_by_layer: dict[str, list[str]] = {}
    for text in [value] if isinstance(value, str) else value or ():
        layer, separator, machine = str(text).rpartition("=")
        if not (layer and separator and machine):
            raise RequestError(f"{text!r} is not LAYER=MACHINE", field)
        machines_by_layer.setdefault(layer, []).append(machine)
    return machines_by_layer


def _machine_names(layer: Any, machines: Any, field: str) -> list[str]:
    names = [machines] if isinstance(machines, str) else machines
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"layer {str(layer)!r} has {machines!r:.80}; give a machine's name, or a list of them", field
        )
    return list(names)


def _shards(value: Any) -> Any:
    """The list of shards from one shard, several or none, with texts parsed; their fields are then validated."""
    shards = [] if value is None else [value] if isinstance(value, Shard | str | Mapping) else value
    if not isinstance(shards, Iterable):
        return shards
    parsed = (_parsed(shard) if isinstance(shard, str) else shard for shard in shards)
    return [vars(shard) if isinstance(shard, Shard) else shard for shard in parsed]


def _parsed(text: str) -> Shard:
    try:
        return Shard.parse(text)
    except PlanError as error:
        raise RequestError(str(error), "shards") from error


_Split = Annotated[Split | str, PlainValidator(_split), PlainSerializer(_split_content)]
_Pins = Annotated[Mapping[str, tuple[str, ...]], BeforeValidator(functools.partial(_machines_of_layers, field="pin"))]
_KeptOff = Annotated[
    Mapping[str, tuple[str, ...]], BeforeValidator(functools.partial(_machines_of_layers, field="keep_off"))
]
DATABASE = option(
    None,
    "The folder of tuned kernels (default: $TVM_SPLIT_DATABASE, or tvm-split/tuning in the user's cache).",
    metavar="FOLDER",
)


@dataclass(frozen=True, repr=False, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PlanRequest(ShownFields):
    """Options for planning a model. A layer's name stands for the layer of that name and all below it.

    Raises:
        PlanError: a field has an invalid value, or fields contradict each other; names the field and the reason.
    """

    PANEL: ClassVar[str] = "Planning"
    """The heading of these options in the help of a command."""

    objective: Objective = option("throughput", "What the plan is made for: results a second, or one input alone.")
    stages: Whole | None = option(
        None, "The exact number of stages. With more than machines, some machines get several.", metavar="N", minimum=1
    )
    split: _Split = option(
        {},
        "Layers for a machine; a name takes all layers below it. `source`: as the ONNX file's own annotations say, "
        "`source:NAME` of several.",
        metavar="MACHINE=LAYERS",
    )
    shards: Annotated[tuple[Shard, ...], BeforeValidator(_shards)] = option(
        (),
        "Layers that machines compute together on each input, by rows, columns, channels, heads or batch; a split is "
        "for the other layers. The form is in docs/inside-layers.md.",
        metavar="SHARD",
        flag="--shard",
    )
    auto_shards: bool = option(
        True,
        "Plans in which machines compute layers together on each input.",
        flag="--no-shards",
    )
    predict: bool = option(False, "Predict what a split by hand will do, too: its kernels and links are measured.")
    fallback: bool = option(False, "Predict too where stages go if a machine is lost; a deployment recovers so.")
    pin: _Pins = option({}, "Keep a layer, or all below that name, on a machine.", metavar="LAYER=MACHINE")
    keep_off: _KeptOff = option({}, "Keep a layer, or all below that name, off a machine.", metavar="LAYER=MACHINE")
    replicas: bool = option(
        False, "Several machines may run the same stage in a round-robin schedule; each holds its weights."
    )
    maximum_machines: Whole | None = option(None, "Use so many machines at most.", metavar="N", minimum=1)
    maximum_latency_seconds: Seconds | None = option(
        None, "One input alone may take so long at most.", metavar="SECONDS", minimum=1e-9, flag="--maximum-latency"
    )
    minimum_throughput: Annotated[float, Number] | None = option(
        None, "Micro-batches a second, at least.", metavar="PER_SECOND", minimum=1e-9
    )
    estimate: bool = option(False, "Measure nothing: plan with estimates from operations and bytes.")
    refresh: bool = option(False, "Measure again what was measured before.")
    time_limit_seconds: Seconds = option(
        PLANNING_SECONDS,
        "Plan within so long: time the kernels that matter most, estimate the rest, take the best plan so far.",
        metavar="SECONDS",
        minimum=0.1,
        flag="--time-limit",
    )
    allow_lossy: Share = option(
        0.0,
        "Links with codec: auto may change outputs by such a share of their range, say 0.01.",
        metavar="SHARE",
        minimum=0.0,
        max=1.0,
    )
    strategy: str = option(
        "best", "By what a plan is searched for: best, first-fit, or a strategy that an installed package adds."
    )
    precision: Precision = option(
        "float32",
        "What convolutions and products take their operands in (float32, float16, bfloat16); they add in float32.",
        metavar="DTYPE",
    )
    database: Path | None = DATABASE
    profile: Annotated[InstanceOf[ClusterProfile] | None, Field(exclude=True)] = field(default=None, repr=False)
    """An existing profile to plan with, instead of measuring. It is not stored in files and has no option."""

    def __post_init__(self) -> None:
        if self.precision != "float32" and self.shards:
            raise RequestError("layers that machines compute together stay in float32", "shards", "precision")
        if self.estimate and self.refresh:
            raise RequestError("an estimate measures nothing", "estimate", "refresh")
        if self.is_by_hand and self.fallback and not self.predict:
            raise RequestError("it compares predictions; add predict to a split or shards", "fallback")
        if self.is_by_hand:
            self.require_default("a split by hand leaves nothing to search", SEARCHING)
        elif self.predict:
            raise RequestError("belongs to a split or shards; what is searched for is predicted", "predict")

    @property
    def is_by_hand(self) -> bool:
        """Whether the user assigns layers to machines, by a split or by shards."""
        return bool(self.split or self.shards)

    @property
    def is_demanding(self) -> bool:
        """Whether the request has demands, besides a number of stages, that only a search can satisfy."""
        return any(name in DEMANDS for name in self.given)

    def require_default(self, problem: str, names: Iterable[str]) -> None:
        """Raise a `RequestError` with the text ``problem`` for the first field of ``names`` that is not its default."""
        for name in names:
            if name in self.given:
                raise RequestError(problem, name)

    def searched(self, **changes: Any) -> PlanRequest:
        """The request with ``changes`` and without a split by hand, for a search."""
        return replace(self, split={}, shards=(), predict=False, **changes)

    def pairs(self, field: Literal["pin", "keep_off"]) -> Iterator[tuple[str, str]]:
        """Pairs of a layer and one of its machines, from the given field."""
        named: Mapping[str, tuple[str, ...]] = getattr(self, field)
        return ((layer, machine) for layer, machines in named.items() for machine in machines)

    @classmethod
    def of(cls, request: PlanRequest | None, fields: Mapping[str, Any], **positional: Any) -> PlanRequest:
        """The request with these fields changed; a new request if ``request`` is None.

        ``positional`` are fields that callers may also give by position; None leaves them as they are.

        Raises:
            PlanError: a field is invalid, or ``request`` is not a `PlanRequest`.
        """
        changes = {**fields, **{name: value for name, value in positional.items() if value is not None}}
        if not isinstance(request, PlanRequest | None):
            raise PlanError(f"request is a PlanRequest, got {request!r:.80}; give its fields as keywords instead")
        return cls(**changes) if request is None else replace(request, **changes)


def _raising_plan_errors(init: Any) -> Any:
    @functools.wraps(init)
    def checked(*arguments: Any, **fields: Any) -> None:
        try:
            init(*arguments, **fields)
        except ValidationError as error:
            raise _as_plan_error(error) from None

    return checked


def _as_plan_error(error: ValidationError) -> PlanError:
    """A `PlanError` with one line for each field that failed to validate."""
    problems = error.errors(include_url=False)
    causes = [problem.get("ctx", {}).get("error") for problem in problems]
    if len(problems) == 1 and isinstance(causes[0], PlanError):
        return causes[0]
    return RequestError(few_lines(map(_sentence, problems), len(problems)))


def _sentence(problem: ErrorDetails) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] != "unexpected_keyword_argument":
        return f"{name} is {problem['input']!r:.80}: {text_of(problem)}"
    names = [field.name for field in options(PlanRequest)]
    near = difflib.get_close_matches(name, names, cutoff=0.5) or names
    return f"there is no argument {name!r}; the nearest are {', '.join(near)}"


PlanRequest.__init__ = _raising_plan_errors(PlanRequest.__init__)  # type: ignore[method-assign]
