"""Benchmark the throughput of networks over two workers of one core each, beside other ways to use two cores.

A pipeline is at most as fast as its slowest stage. For comparison: two workers that each compute the whole network, one
of them alone, and onnxruntime on both cores. ``--set seconds=3``: of each stream.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tvm_split
from scripts.harness import Case, Ratio, Setup, Side, median_seconds
from scripts.processes import Figures, Prepared, measure_together
from scripts.sides import RUNS, arrivals, by_onnxruntime, in_process, loaded, rate

PIPELINE, ALONE, EACH_WHOLE = "pipeline of two workers", "one worker", "two workers, each the whole"
ONE_RUN, IN_PROCESS = "one input, one worker", "one input, in process"
ONE_SESSION, TWO_SESSIONS = "onnxruntime, one session of two threads", "onnxruntime, two sessions of one thread"
NETWORKS = ("resnet50", "vgg16", "mobilenet_v2", "bert_base")


def streamed(deployment: tvm_split.Deployment, inputs: Sequence[Any], seconds: float) -> Figures:
    """Return the throughput of a stream fed for ``seconds``, and its share of the slowest stage's rate."""
    before = {stage.name: stage.compute_seconds for stage in deployment.stats().stages}
    times = arrivals(deployment, inputs, seconds)
    stages = deployment.stats().stages
    slowest = max(stage.compute_seconds - before[stage.name] for stage in stages) / len(times)
    per_second = rate(times)
    return {"per_second": per_second, "share_of_slowest_stage": per_second * slowest}


@contextmanager
def workers(name: str, split: Mapping[str, Sequence[str]] | None = None) -> Iterator[Prepared]:
    """Start two workers of one core each; ``split`` is the pipeline's split, by default a planned one."""
    _, arrays, model = loaded(name)
    with ExitStack() as until_end:
        cluster = until_end.enter_context(tvm_split.Cluster.local(2))
        options = {"split": split} if split else {"stages": 2, "refresh": True}
        plan = tvm_split.plan(model, cluster, **options)
        first = model.layer_names[0]
        plans = [plan, *(tvm_split.plan(model, cluster, split={machine: [first]}) for machine in cluster.machine_names)]
        pipeline, *wholes = (
            until_end.enter_context(tvm_split.deploy(tvm_split.compile(model, plan, verify=False), cluster))
            for plan in plans
        )
        threads = until_end.enter_context(ThreadPoolExecutor(len(wholes)))

        def measure(what: str, seconds: float) -> Figures:
            if what == ONE_RUN:
                return {"seconds": median_seconds(lambda: wholes[0].run(*arrays), RUNS)}
            if what == EACH_WHOLE:
                both = threads.map(lambda whole: streamed(whole, arrays, seconds), wholes)
                return {"per_second": sum(figures["per_second"] for figures in both)}
            return streamed(pipeline if what == PIPELINE else wholes[0], arrays, seconds)

        yield Prepared(measure, {"split": {stage.machine: stage.layers for stage in plan.stages}})


def sides(name: str, setup: Setup) -> Sequence[Side]:
    cores, seconds = sorted(os.sched_getaffinity(0))[:2], float(setup.options.values.get("seconds", 3.0))
    all_sides: list[Side] = []
    split = None
    for checkout in setup.checkouts:
        process = setup.begin(workers, checkout, name=name, split=split)
        split = process.ready()["split"]  # other checkouts use the same split
        layers = {machine: len(layers) for machine, layers in split.items()}
        for what in (PIPELINE, ALONE, EACH_WHOLE, ONE_RUN):
            measure = partial(process.measure, what=what, seconds=seconds)
            all_sides.append(Side(what, measure, {"layers": layers}, checkout.label))
    all_sides.append(setup.side(IN_PROCESS, in_process, name=name, threads=1))
    one_session = setup.side(ONE_SESSION, by_onnxruntime, name=name, threads=2, cores=cores)
    all_sides.append(Side(ONE_SESSION, partial(one_session.measure, seconds=seconds)))
    sessions = [setup.begin(by_onnxruntime, name=name, threads=1, cores=[core]) for core in cores]
    for session in sessions:
        session.ready()
    all_sides.append(Side(TWO_SESSIONS, partial(measure_together, sessions, seconds=seconds)))
    return all_sides


CASE = Case(
    subjects={name: partial(sides, name) for name in NETWORKS},
    ratios=(
        *(Ratio("per_second", PIPELINE, baseline) for baseline in (ALONE, EACH_WHOLE, ONE_SESSION, TWO_SESSIONS)),
        Ratio("seconds", ONE_RUN, IN_PROCESS),
    ),
)
