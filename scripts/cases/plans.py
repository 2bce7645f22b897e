"""Benchmark plans beside their predictions, and beside splits that people make without a planner.

Every round profiles the machines again, so that predictions and measurements see the same machine state.
``--set workers=2``: local workers.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

import tvm_split
from scripts.harness import Case, Ratio, Setup, Side
from scripts.processes import Figures, Prepared
from scripts.sides import loaded

PLANNED, ALL_WORKERS, ONE = "planned", "planned, all workers", "one worker"
LAYERS, PARAMETERS = "equal layers", "equal parameters"
NETWORKS = ("resnet50", "vgg16", "mobilenet_v2", "bert_base")
STREAM_SECONDS = 1.5


def cut_evenly(weights: Sequence[float], parts: int) -> list[int]:
    """Return the first index of each part of a sequence, cut so that the parts' sums are as equal as possible."""
    sums = [0.0, *itertools.accumulate(weights)]
    starts = [0]
    for part in range(1, parts):
        last = len(weights) - (parts - part)
        target_sum = sums[-1] * part / parts
        starts.append(min(range(starts[-1] + 1, last + 1), key=lambda cut: abs(sums[cut] - target_sum)))
    return starts


def parameters_of(module: nn.Module, layer: str) -> float:
    """Return a layer's number of parameters, by its path in the module; 0 for non-modules, such as an addition."""
    try:
        return float(sum(parameter.numel() for parameter in module.get_submodule(layer).parameters(recurse=False)))
    except AttributeError:
        return 0.0


@contextmanager
def all_plans(name: str, workers: int) -> Iterator[Prepared]:
    module, arrays, model = loaded(name)
    layers = model.layer_names
    with tvm_split.Cluster.local(workers) as cluster:

        def split_by(weights: Sequence[float]) -> dict[str, list[str]]:
            starts = cut_evenly(weights, workers)
            return {machine: [layers[start]] for machine, start in zip(cluster.machine_names, starts, strict=True)}

        splits = {
            ONE: {cluster.machine_names[0]: [layers[0]]},
            LAYERS: split_by([1.0] * len(layers)),
            PARAMETERS: split_by([parameters_of(module, layer) for layer in layers]),
        }
        plans = {
            PLANNED: tvm_split.plan(model, cluster, refresh=True),
            ALL_WORKERS: tvm_split.plan(model, cluster, stages=workers),
            **{title: tvm_split.plan(model, cluster, split=split) for title, split in splits.items()},
        }
        bundles = {title: tvm_split.compile(model, plan, verify=False) for title, plan in plans.items()}

        def measure(way: str) -> Figures:
            split = {stage.machine: stage.layers for stage in plans[way].stages}
            predicted = tvm_split.plan(model, cluster, split=split, predict=True, refresh=True).prediction
            assert predicted is not None
            count = max(20, int(STREAM_SECONDS / predicted.period_seconds))
            with tvm_split.deploy(bundles[way], cluster) as deployment:
                report = tvm_split.bench(deployment, [arrays], rounds=1, micro_batches=count)
            period, latency = report.period.measured or 0.0, report.latency.measured or 0.0
            return {
                "period_seconds": period,
                "period_over_predicted": period / predicted.period_seconds,
                "latency_seconds": latency,
                "latency_over_predicted": latency / predicted.latency_seconds,
            }

        yield Prepared(
            measure,
            {
                title: {"layers": {stage.machine: len(stage.layers) for stage in plan.stages}}
                for title, plan in plans.items()
            },
        )


def sides(name: str, setup: Setup) -> Sequence[Side]:
    return setup.sides(all_plans, name=name, workers=int(setup.options.values.get("workers", 2)))


CASE = Case(
    subjects={name: partial(sides, name) for name in NETWORKS},
    ratios=tuple(Ratio("period_seconds", baseline, PLANNED) for baseline in (ALL_WORKERS, ONE, LAYERS, PARAMETERS)),
)
