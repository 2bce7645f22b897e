"""What a plan must keep to, on the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_split.cli.wrong_use import WrongUseError

if TYPE_CHECKING:
    from tvm_split.planner.model_problem import Constraints

PinOption = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="LAYER=MACHINE", help="Keep a layer, or all below that name, there. Repeatable."),
]
KeepOffOption = Annotated[
    list[str] | None,
    typer.Option("--keep-off", metavar="LAYER=MACHINE", help="Keep a layer, or all below that name, off. Repeatable."),
]
ReplicasOption = Annotated[
    bool, typer.Option("--replicas", help="A stage may be dealt out over several machines that take turns.")
]
MaximumMachinesOption = Annotated[
    int | None, typer.Option("--maximum-machines", min=1, help="Use so many machines at most.")
]
MaximumLatencyOption = Annotated[
    float | None,
    typer.Option("--maximum-latency", min=1e-9, metavar="SECONDS", help="One input alone may take so long at most."),
]
MinimumThroughputOption = Annotated[
    float | None,
    typer.Option("--minimum-throughput", min=1e-9, metavar="PER_SECOND", help="Micro-batches a second, at least."),
]
RefreshOption = Annotated[bool, typer.Option("--refresh", help="Measure anew what was measured before.")]
EstimateOption = Annotated[
    bool, typer.Option("--estimate", help="Measure nothing: plan with estimates from operations and bytes.")
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit", min=0.1, metavar="SECONDS", help="Search so long, then take the best so far (default: 10)."
    ),
]
ReplanOption = Annotated[
    Path | None,
    typer.Option(
        "--replan", metavar="PLAN", dir_okay=False, help="Improve this plan by --measured; see docs/explaining.md."
    ),
]
MeasuredOption = Annotated[
    Path | None,
    typer.Option(
        "--measured", metavar="REPORT", dir_okay=False, help="With --replan: what `tvm-split bench --json` printed."
    ),
]
ThresholdOption = Annotated[
    float,
    typer.Option("--threshold", min=0.0, max=1.0, help="With --replan: the least gain that changes the plan."),
]
WriteProblemOption = Annotated[
    Path | None,
    typer.Option("--write-problem", metavar="FILE", help="Write what is searched, for `tvm-split plan --problem`."),
]


@dataclass(frozen=True)
class SearchRequest:
    """How the command line limits the search."""

    stages: int | None = None
    pins: Sequence[str] = ()
    kept_off: Sequence[str] = ()
    replicas: bool = False
    maximum_machines: int | None = None
    maximum_latency: float | None = None
    minimum_throughput: float | None = None

    def constraints(self) -> Constraints:
        """Raises a `WrongUseError` for a pin that cannot be read."""
        from tvm_split.planner.model_problem import Constraints

        return Constraints(
            stages=self.stages,
            pins=tuple(_pairs(self.pins, "--pin")),
            kept_off=tuple(_pairs(self.kept_off, "--keep-off")),
            replicas=self.replicas,
            maximum_machines=self.maximum_machines,
            maximum_period_seconds=1.0 / self.minimum_throughput if self.minimum_throughput else math.inf,
            maximum_latency_seconds=self.maximum_latency or math.inf,
        )


def _pairs(given: Sequence[str], option: str) -> Iterator[tuple[str, str]]:
    for text in given:
        layer, separator, machine = text.rpartition("=")
        if not (layer and separator and machine):
            raise WrongUseError(f"{text!r} is not LAYER=MACHINE", option)
        yield layer, machine
