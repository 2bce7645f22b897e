"""Layers that several machines compute together on one input, as a user asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tvm_split.errors import PlanError
from tvm_split.planner.problem import Axis, Exchange, Stage


@dataclass(frozen=True)
class Shard:
    """The layers from ``first`` to ``last``, in the order of execution, shared out over machines.

    A name stands for the layer of that name and all below it. ``shares`` are the machines' parts of the work, together
    1; weights are shared out the same way for ``"channels"`` and ``"heads"``, and whole on each machine for others.

    ``axis`` says what is dealt out: ``"rows"`` or ``"columns"`` of feature maps, output ``"channels"`` of layers,
    ``"heads"`` of attention, samples of a ``"batch"``. ``exchange`` says what travels between the machines:
    ``"fused"`` as little as can be (rows beyond a part are computed twice; a product by columns is followed by one by
    rows, and the sum travels), ``"each"`` what a layer needs, after each layer.
    """

    first: str
    last: str
    axis: Axis
    shares: Mapping[str, float]
    exchange: Exchange = "fused"

    def __str__(self) -> str:
        return f"the shard of {self.axis} from {self.first!r} to {self.last!r}"


def as_shards(given: Shard | Iterable[Shard] | None) -> tuple[Shard, ...]:
    """One shard, several, or none.

    Raises:
        PlanError: it is something else.
    """
    if given is None:
        return ()
    shards = (given,) if isinstance(given, Shard) else tuple(given) if isinstance(given, Iterable) else (given,)
    for each in shards:
        if not isinstance(each, Shard):
            raise PlanError(
                f"shards has {each!r}; give tvm_split.Shard(first=, last=, axis=, shares=), or a list of them"
            )
    return shards


def sharding_words(stage: Stage) -> str:
    """How machines compute each micro-batch of a stage together; empty for a stage that they do not share."""
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
