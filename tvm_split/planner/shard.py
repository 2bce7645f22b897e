"""The shards that a user asks for: layers that several machines compute together on each input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from tvm_split.errors import PlanError
from tvm_split.planner.problem import Axis, Exchange, Share, Stage
from tvm_split.units import ShownFields

FORM = "FIRST..LAST:AXIS:MACHINE=SHARE,MACHINE=SHARE[:EXCHANGE]"
"""The text form of a shard, for command lines."""


@dataclass(frozen=True, repr=False)
class Shard(ShownFields):
    """The layers from ``first`` to ``last``, in the order of execution, sharded over machines.

    A name stands for the layer of that name and all below it. ``shares`` are the machines' parts of the work and add up
    to 1. Weights are sharded the same way for ``"channels"`` and ``"heads"``; otherwise each machine has all of them.

    ``axis`` is what is sharded: ``"rows"`` or ``"columns"`` of feature maps, output ``"channels"`` of layers,
    ``"heads"`` of attention, samples of a ``"batch"``. ``exchange`` is what the machines transfer: with ``"fused"`` as
    little as possible (halo rows are computed twice; a column-parallel product is followed by a row-parallel one, and
    the partial sums are transferred), with ``"each"`` what a layer needs, after each layer.
    """

    first: str
    last: str
    axis: Axis
    shares: Mapping[str, Share]
    exchange: Exchange = "fused"

    def __str__(self) -> str:
        return f"the shard of {self.axis} from {self.first!r} to {self.last!r}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse a shard from a text of the `FORM`, or from YAML in braces with the fields of this class.

        A single layer is both the first and the last. Names that contain ``..`` need YAML.

        Raises:
            PlanError: the text has another form, or an invalid axis, share or exchange.
        """
        axes, exchanges = get_args(Axis), get_args(Exchange)
        if text.lstrip().startswith("{"):
            return _from_yaml(text)
        match = re.fullmatch(rf"(.+):({'|'.join(axes)}):(.*=[^:]*?)(?::([^:=]*))?", text, re.DOTALL)
        if match is None:
            raise PlanError(f"{text!r} is not {FORM} (AXIS is {', '.join(axes)}; EXCHANGE {' or '.join(exchanges)})")
        names, axis, shares, exchange = match.groups(default="")
        first, _, last = names.partition("..")
        if match[4] is not None and exchange not in exchanges:
            raise PlanError(f"{text!r} has the exchange {exchange!r}; it can be {' or '.join(exchanges)}")
        ends = first.strip(), (last or first).strip()
        return cls(*ends, cast(Axis, axis), _shares(text, shares), cast(Exchange, exchange or exchanges[0]))


def _shares(text: str, shares_text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in shares_text.split(","):
        machine, separator, share = (field.strip() for field in part.rpartition("="))
        if not (machine and separator):
            raise PlanError(f"{text!r} has {part!r}, which is not MACHINE=SHARE")
        if machine in shares:
            raise PlanError(f"{text!r} has two shares for {machine!r}; give it their sum")
        try:
            shares[machine] = float(share)
        except ValueError:
            raise PlanError(f"{text!r} gives {machine!r} {share!r}, which is no share like 0.5") from None
    return shares


def _from_yaml(text: str) -> Shard:
    try:
        return TypeAdapter(Shard).validate_python(yaml.safe_load(text), extra="forbid")
    except (yaml.YAMLError, ValidationError) as error:
        raise PlanError(f"{text!r} is no shard in YAML: {error}") from error


def sharding_words(stage: Stage) -> str:
    """A description of how a stage is sharded over its machines; empty for a stage without a sharding."""
    if stage.sharding is None:
        return ""
    axis = stage.sharding.axis
    parts = [f"{machine} {share:.2g}" for machine, share in zip(stage.machines, stage.shares, strict=True)]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed} of the {axis}; {_travels(axis, stage.sharding.exchange)}"


def _travels(axis: Axis, exchange: Exchange) -> str:
    if axis == "batch":
        return "nothing travels between them"
    if axis in ("rows", "columns"):
        return f"{axis} beyond a part are " + ("computed twice" if exchange == "fused" else "exchanged at each window")
    return "sums travel, one for two layers" if exchange == "fused" else "outputs are gathered for each product"
