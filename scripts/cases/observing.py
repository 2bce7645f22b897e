"""Benchmark what observing costs: a stream while everything is observed, beside the same while nothing is.

Everything is a trace that follows, metrics of both workers and of the client that are read every two seconds, and the
page, read as a browser does. Each network has one deployment on two workers of one core each. Where other programs run,
throughput says little; then the processor time of single events and polls says more. ``--set seconds=6``: of each
stream.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

import tvm_split
from scripts.cases.links import processor_seconds
from scripts.harness import Case, Ratio, Setup, Side
from scripts.processes import Figures, Prepared
from scripts.sides import arrivals, network, rate
from tests.helpers.rpc_lab import free_port

OFF, ON = "nothing observed", "all observed"
SMALL = "stages of 0.3 ms"
NETWORKS = (SMALL, "mobilenet_v2", "resnet50")
SCRAPE_SECONDS, REFRESH_SECONDS = 2.0, 2.0
RECORDED, POLLS = 200_000, 200
CAN_OBSERVE = hasattr(tvm_split.Deployment, "dashboard")
"""Whether this checkout has what is measured: another one may not."""


def model_of(name: str) -> tuple[tvm_split.Model, Sequence[torch.Tensor]]:
    if name == SMALL:
        layers = [layer for _ in range(10) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
        module, inputs = nn.Sequential(*layers).eval(), (torch.ones(1, 16, 44, 44),)
    else:
        module, inputs = network(name)
    return tvm_split.load_model(module, inputs, name=name), inputs


@contextlib.contextmanager
def deployed(
    name: str, split: dict[str, list[str]] | None = None
) -> Iterator[tuple[tvm_split.Deployment, tvm_split.Cluster, list[str]]]:
    """Yield a deployment, its two workers of one core each, and the addresses of their metrics."""
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(2)] if CAN_OBSERVE else []
    addresses = []
    with contextlib.ExitStack() as until_end:
        for core, machine in enumerate(("machine-a", "machine-b")):
            options = ["--name", machine, "--cores", str(core), "--json", "--exit-with-parent"]
            options += ["--metrics-listen", metrics[core]] if CAN_OBSERVE else []
            command = [sys.executable, "-P", "-m", "tvm_split", "worker", *options]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            until_end.enter_context(process)  # closing its standard input ends it
            assert process.stdout is not None
            addresses.append(json.loads(process.stdout.readline())["address"])
        cluster = tvm_split.Cluster.at(f"at:{','.join(addresses)}")
        model, _ = model_of(name)
        plan = tvm_split.plan(model, cluster, estimate=True, **({"split": split} if split else {"stages": 2}))
        bundle = tvm_split.compile(model, plan, verify=False)
        yield until_end.enter_context(tvm_split.deploy(bundle, cluster)), cluster, metrics


@contextlib.contextmanager
def observed(deployment: tvm_split.Deployment, metrics: Sequence[str]) -> Iterator[None]:
    """Follow all events, and read all metrics and the page, at once and then again and again."""
    ended = threading.Event()

    def read(urls: Sequence[str], seconds: float) -> None:
        while True:
            for url in urls:
                with urllib.request.urlopen(url, timeout=30) as reply:
                    reply.read()
            if ended.wait(seconds):
                return

    with deployment.serve_metrics() as server, deployment.dashboard() as page, deployment.tracing():
        urls = [*(f"http://{address}/metrics" for address in metrics), server.url]
        readers = [(urls, SCRAPE_SECONDS), ([f"{page.url}page.json"], REFRESH_SECONDS)]
        with ThreadPoolExecutor() as threads:
            reading = [threads.submit(read, *reader) for reader in readers]
            try:
                yield
            finally:
                ended.set()
        for one in reading:
            one.result()  # raises what a reader has raised


@contextlib.contextmanager
def streams(name: str, seconds: float, split: dict[str, list[str]] | None = None) -> Iterator[Prepared]:
    arrays = [tensor.numpy() for tensor in model_of(name)[1]]
    with deployed(name, split) as (deployment, _, metrics):

        def measure(way: str) -> Figures:
            times: list[float] = []
            with observed(deployment, metrics) if way == ON else contextlib.nullcontext():
                client = time.process_time()
                used = processor_seconds(lambda: times.extend(arrivals(deployment, arrays, seconds)))
                used += time.process_time() - client
            return {"per_second": rate(times), "processor_seconds": used / len(times)}

        measure(OFF)
        split = {stage.machine: list(stage.layers) for stage in deployment.stages}
        yield Prepared(measure, {"split": split, "ways": [OFF, ON] if CAN_OBSERVE else [OFF]})


def sides(name: str, setup: Setup) -> Sequence[Side]:
    seconds, split, all_sides = float(setup.options.values.get("seconds", 6.0)), None, []
    for checkout in setup.checkouts:
        process = setup.begin(streams, checkout, name=name, seconds=seconds, split=split)
        facts = process.ready()
        split = facts["split"]  # other checkouts use the same split
        all_sides += [Side(way, partial(process.measure, way=way), {}, checkout.label) for way in facts["ways"]]
    return all_sides


@contextlib.contextmanager
def costs() -> Iterator[Prepared]:
    """Measure the processor time of one event that is recorded or read, and of one poll of a machine."""
    from rpc_runtime.client.bystander import Bystander, running_on
    from rpc_runtime.client.worker_client import describe_all
    from rpc_runtime.program.events import Recorder

    arrays = [tensor.numpy() for tensor in model_of(SMALL)[1]]
    recorder = Recorder()
    track = recorder.track("compute", "stage")

    def record() -> None:
        for sequence in range(RECORDED):
            recorder.record(track, sequence, 0, 1)

    with deployed(SMALL) as (deployment, cluster, _):
        endpoints = {one.name: one.endpoint for one in cluster.machines if one.endpoint is not None}
        (running,) = running_on(describe_all(endpoints))
        with Bystander(endpoints, running) as bystander:

            def microseconds(run: Callable[[], object], count: int) -> float:
                begin = time.process_time()
                workers = processor_seconds(run)
                return (workers + time.process_time() - begin) / count * 1e6

            def measure() -> Figures:
                arrivals(deployment, arrays, 2.0)
                newest = {machine: seen.newest for machine, seen in bystander.observe().items()}
                events = sum(len(seen.table()) for seen in bystander.observe({}).values())
                polls = len(newest) * POLLS
                return {
                    "recorded_event_microseconds": microseconds(record, RECORDED),
                    "read_event_microseconds": microseconds(lambda: bystander.observe({}), events),
                    "poll_microseconds": microseconds(lambda: [bystander.observe(newest) for _ in range(POLLS)], polls),
                }

            yield Prepared(measure)


CASE = Case(
    subjects={
        **{name: partial(sides, name) for name in NETWORKS},
        "costs": lambda setup: [setup.side("processor time", costs)],
    },
    ratios=(Ratio("per_second", ON, OFF), Ratio("processor_seconds", ON, OFF)),
    rounds=11,
)
