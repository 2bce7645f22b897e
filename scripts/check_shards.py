"""Check well-known networks that two and three workers share in every way against torch in float64.

By rows, columns, channels, heads and batch, with each exchange, in equal and unequal shares. Prints for each the
largest difference as a share of the range of its outputs, and the largest part of the weights that a worker says it
holds; writes JSON. Exits with 1 if a difference passes the limit, if the same inputs have other results the second
time, if a way is refused, or if halves by channels or heads leave a worker more than 0.55 of the weights of a network
of products.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tvm_split
from scripts.rounds import largest_difference, written
from tests.models import torch_models, unet
from tvm_split import Shard
from tvm_split.planner.problem import Axis, Exchange

LIMIT = 1e-4
MOST_HELD = 0.55
OF_PRODUCTS = ("vgg16", "bert_base", "gpt2_small")
"""Networks of which nearly all weights are in products; norms between them, which every worker has, are few."""
MACHINES = ("machine-a", "machine-b", "machine-c")
SHARES = ((0.5, 0.5), (0.6, 0.4), (0.5, 0.3, 0.2))
SAMPLES = 5
"""Of a batch, so that its parts are unequal."""
AXES: dict[int, Sequence[Axis]] = {4: ("rows", "columns", "channels", "batch"), 2: ("channels", "heads", "batch")}
"""By the rank of the first input: images, and words."""
PUBLISHED = ("vgg16", "resnet50", "mobilenet_v2", "unet", "bert_base", "gpt2_small")
SMALL = ("vgg", "resnet", "mobilenet", "small_unet", "bert", "gpt2")


def network(name: str, pixels: int, tokens: int) -> tuple[nn.Module, Sequence[Tensor]]:
    """One of `PUBLISHED` or `SMALL`, and example inputs."""
    if name in SMALL:
        return {**torch_models.small_models(), "small_unet": (unet.unet(), (torch.randn(1, 3, 16, 16),))}[name]
    builders = torch_models.published_models(tokens, pixels)
    build, examples = {**builders, "unet": (unet.published_unet, builders["vgg16"][1])}[name]
    return build(), examples


class Checked:
    """A network for ``samples`` inputs at once, and what torch makes of two such in float64."""

    def __init__(self, name: str, made: nn.Module, examples: Sequence[Tensor], samples: int) -> None:
        self.name = name
        first = tuple(torch.cat([each[:1].roll(sample, -1) for sample in range(samples)]) for each in examples)
        self._inputs = [first, tuple(each.roll(-1, -1) for each in first)]
        self.model = tvm_split.load_model(made, first, name=name)
        exact = copy.deepcopy(made).double()
        with torch.no_grad():
            exactly = [tree_leaves(exact(*map(_exact, each))) for each in self._inputs]
        self._expected = [[output.numpy() for output in outputs] for outputs in exactly]

    def weight_bytes(self, cluster: tvm_split.Cluster) -> int:
        """Of one worker that has everything."""
        plan = tvm_split.plan(self.model, cluster, split={MACHINES[0]: [self.model.graph.layers[0]]})
        with tvm_split.deploy(tvm_split.compile(self.model, plan, verify=False), cluster) as deployment:
            return deployment.stats().weight_bytes[MACHINES[0]]

    def check(
        self, cluster: tvm_split.Cluster, axis: Axis, exchange: Exchange, shares: Sequence[float], whole_bytes: int
    ) -> dict[str, Any]:
        """What came of it in one way, as a row of the results."""
        row = {"model": self.name, "axis": axis, "exchange": exchange, "shares": shares}
        try:
            plan = tvm_split.plan(self.model, cluster, shards=self._shards(axis, exchange, shares))
        except tvm_split.PlanError as refusal:
            return {**row, "refused": str(refusal), "good": False}
        with tvm_split.deploy(tvm_split.compile(self.model, plan, verify=False), cluster) as deployment:
            found, again = (list(deployment.stream(self._inputs)) for _ in range(2))
            held = max(deployment.stats().weight_bytes.values()) / whole_bytes
        difference = max(largest_difference(*each) for each in zip(found, self._expected, strict=True))
        is_same = all(map(np.array_equal, tree_leaves(found), tree_leaves(again)))
        is_limited = self.name in OF_PRODUCTS and axis in ("channels", "heads") and len(set(shares)) == 1
        return {
            **row,
            "largest_difference_of_range": difference,
            "same_again": is_same,
            "largest_share_of_weights": held,
            "good": difference < LIMIT and is_same and not (is_limited and held > MOST_HELD),
        }

    def _shards(self, axis: Axis, exchange: Exchange, shares: Sequence[float]) -> list[Shard]:
        """The whole network; of VGG, whose classifier reads all rows at once, that by channels."""
        parts, layers = dict(zip(MACHINES, shares, strict=False)), self.model.graph.layers
        if axis in ("rows", "columns") and self.name.startswith("vgg"):
            behind = Shard("flatten", "classifier", "channels", parts, exchange)
            return [Shard("features", "features", axis, parts, exchange), behind]
        return [Shard(layers[0], layers[-1], axis, parts, exchange)]


def _exact(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def ways(
    axes: Sequence[Axis], several_shares: Sequence[Sequence[float]]
) -> Iterator[tuple[Axis, Exchange, Sequence[float]]]:
    for axis in axes:
        for exchange in get_args(Exchange) if axis != "batch" else ("fused",):
            for shares in several_shares:
                yield axis, exchange, shares


def check(
    name: str, options: argparse.Namespace, cluster: tvm_split.Cluster, said: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    made, examples = network(name, options.pixels, options.tokens)
    axes = [each for each in AXES[examples[0].ndim] if each in (options.axis or get_args(Axis))]
    if not axes:
        return
    checked = {
        samples: Checked(name, made, examples, samples)
        for samples in {SAMPLES if each == "batch" else 1 for each in axes}
    }
    whole_bytes = next(iter(checked.values())).weight_bytes(cluster)
    for axis, exchange, shares in ways(axes, options.shares or SHARES):
        row = checked[SAMPLES if axis == "batch" else 1].check(cluster, axis, exchange, shares, whole_bytes)
        way = f"{name:12} {axis:8} {exchange:5} {' / '.join(map(str, shares)):15}"
        said(f"{'ok' if row['good'] else 'FAILED':6} {way} {told(row)}")
        yield row


def told(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"refused: {row['refused']}"
    return (
        f"largest difference {row['largest_difference_of_range']:.1e} of the range, "
        f"{row['largest_share_of_weights']:.3f} of the weights on a worker at most"
        + ("" if row["same_again"] else ", other results the second time")
    )


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join((*PUBLISHED, *SMALL))}; by default the first six")
    parser.add_argument("--axis", choices=get_args(Axis), action="append", help="only this one; repeatable")
    parser.add_argument("--shares", type=float, nargs="+", action="append", help="only these, as 0.6 0.4; repeatable")
    parser.add_argument("--pixels", type=int, default=224, help="of images of the published networks")
    parser.add_argument("--tokens", type=int, default=128, help="of texts")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    with tvm_split.Cluster.local(workers=len(MACHINES), threads=1) as cluster:
        rows = [row for name in options.models or PUBLISHED for row in check(name, options, cluster, console.print)]
    written(options.output, {"limit": LIMIT, "most_held": MOST_HELD, "results": rows})
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
