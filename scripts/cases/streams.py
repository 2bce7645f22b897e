"""Benchmark the throughput of networks over two workers of one core each, beside other ways to use two cores.

A pipeline is at most as fast as its slowest stage. For comparison: two workers that each compute the whole network, one
of them alone, onnxruntime on both cores, and for ResNet-50 torch.distributed.pipelining.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import tvm_split
from scripts.harness import Case, MakeSides, Options, Ratio, Setup, Side, median_seconds
from scripts.processes import Figures, Prepared, measure_together
from scripts.sides import RUNS, by_onnxruntime, in_process, network
from scripts.streaming import arrivals, rate

PIPELINE, ALONE, EACH_WHOLE = "pipeline of two workers", "one worker", "two workers, each the whole"
ONE_RUN, IN_PROCESS = "one input, one worker", "one input, in process"
ONE_SESSION, TWO_SESSIONS = "onnxruntime, one session of two threads", "onnxruntime, two sessions of one thread"
TORCH_WHOLE = "torch, two processes, each the whole"
TORCH_STEPS = (4, 8, 16, 32)
NETWORKS = ("resnet50", "vgg16", "mobilenet_v2", "bert_base")
WITH_TORCH = "resnet50"


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
    module, inputs = network(name)
    arrays = [tensor.numpy() for tensor in inputs]
    model = tvm_split.load_model(module, inputs, name=name)
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


class Sendable(nn.Module):
    """A part whose result is contiguous in the default layout, as gloo requires for sending."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.part(x)
        return result.contiguous()


def pieces_of(resnet: Any) -> list[nn.Module]:
    """Return a ResNet as consecutive pieces: its stem, every block, and its head."""
    stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
    head = nn.Sequential(resnet.avgpool, nn.Flatten(1), resnet.fc)
    return [stem, *(block for index in range(4) for block in getattr(resnet, f"layer{index + 1}")), head]


def even_cut(pieces: Sequence[nn.Module], x: torch.Tensor) -> int:
    """Return the first rank's number of pieces that makes the slower of both ranks as fast as possible."""
    seconds = []
    for piece in pieces:
        seconds.append(median_seconds(partial(piece, x), RUNS))
        x = piece(x)
    return min(range(1, len(pieces)), key=lambda cut: max(sum(seconds[:cut]), sum(seconds[cut:])))


@contextmanager
def torch_rank(rank: int, address: str, core: int) -> Iterator[Prepared]:
    """Run one of two ranks of torch's pipeline on gloo, in inference mode; rank 0 chooses the cut."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    module, (x,) = network(WITH_TORCH)
    pieces = pieces_of(module.to(memory_format=torch.channels_last))
    with torch.inference_mode():
        cut = torch.tensor([even_cut(pieces, x) if rank == 0 else 0])
        distributed.broadcast(cut, 0)
        whole, own_pieces = nn.Sequential(*pieces), pieces[: int(cut)] if rank == 0 else pieces[int(cut) :]
        part, schedules = Sendable(nn.Sequential(*own_pieces)), {}

        def measure(micro_batches: int, seconds: float) -> Figures:
            """Run steps for ``seconds``; with 0 micro-batches, each rank computes the whole network alone."""
            if micro_batches and micro_batches not in schedules:
                stage = PipelineStage(part, rank, 2, torch.device("cpu"))
                schedules[micro_batches] = ScheduleGPipe(stage, micro_batches)
            images = x.repeat(max(1, micro_batches), 1, 1, 1)
            arguments = (images,) if rank == 0 or not micro_batches else ()
            step = partial(schedules[micro_batches].eval if micro_batches else whole, *arguments)
            count = torch.tensor([max(1, round(seconds / median_seconds(step, 1)))])
            distributed.broadcast(count, 0)  # both ranks run the same number of steps
            start = time.perf_counter()
            for _ in range(int(count)):
                step()
            distributed.barrier()
            per_second = int(count) * max(1, micro_batches) / (time.perf_counter() - start)
            return {"per_second": per_second if rank or not micro_batches else 0.0}

        yield Prepared(measure)
    distributed.destroy_process_group()


def torch_sides(setup: Setup, cores: Sequence[int], seconds: float) -> Sequence[Side]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    ranks = [
        setup.begin(torch_rank, environment={"OMP_NUM_THREADS": "1"}, rank=rank, address=address, core=core)
        for rank, core in enumerate(cores)
    ]
    for rank in ranks:
        rank.ready()
    steps = {TORCH_WHOLE: 0, **{torch_side(count): count for count in TORCH_STEPS}}
    return [
        Side(name, partial(measure_together, ranks, micro_batches=count, seconds=seconds))
        for name, count in steps.items()
    ]


def torch_side(micro_batches: int) -> str:
    return f"torch pipeline, {micro_batches} micro-batches per step"


def sides(name: str, setup: Setup) -> Sequence[Side]:
    cores, seconds = sorted(os.sched_getaffinity(0))[:2], float(setup.options.values.get("seconds", 3.0))
    all_sides: list[Side] = []
    split = None
    for checkout in setup.checkouts:
        process = setup.begin(workers, checkout, name=name, split=split)
        facts = process.ready()
        split = facts["split"]  # other checkouts use the same split
        for what in (PIPELINE, ALONE, EACH_WHOLE, ONE_RUN):
            measure = partial(process.measure, what=what, seconds=seconds)
            layers = {machine: len(layers) for machine, layers in split.items()}
            all_sides.append(Side(what, measure, {"layers": layers} if what == PIPELINE else {}, checkout.label))
    all_sides.append(setup.side(IN_PROCESS, in_process, name=name, threads=1))
    one_session = setup.side(ONE_SESSION, by_onnxruntime, name=name, threads=2, cores=cores)
    all_sides.append(Side(ONE_SESSION, partial(one_session.measure, seconds=seconds)))
    sessions = [setup.begin(by_onnxruntime, name=name, threads=1, cores=[core]) for core in cores]
    for session in sessions:
        session.ready()
    all_sides.append(Side(TWO_SESSIONS, partial(measure_together, sessions, seconds=seconds)))
    return [*all_sides, *(torch_sides(setup, cores, seconds) if name == WITH_TORCH else ())]


def subjects(options: Options) -> Mapping[str, MakeSides]:
    return {name: partial(sides, name) for name in NETWORKS}


CASE = Case(
    doc="Throughput of networks over two workers of one core each, beside other ways to use two cores. "
    "--set seconds=3: of each stream.",
    subjects=subjects,
    ratios=(
        *(Ratio("per_second", PIPELINE, baseline) for baseline in (ALONE, EACH_WHOLE, ONE_SESSION, TWO_SESSIONS)),
        *(Ratio("per_second", PIPELINE, torch_side(count)) for count in TORCH_STEPS),
        *(Ratio("per_second", torch_side(count), TORCH_WHOLE) for count in TORCH_STEPS),
        Ratio("seconds", ONE_RUN, IN_PROCESS),
    ),
)
