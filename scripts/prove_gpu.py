"""Six well-known networks on a GPU: right, how fast beside torch's ways and the device's limits, and in a pipeline.

Needs no network, and ends within its time: what was not reached is told as such. With ``--target llvm`` a CPU worker
stands for the GPU's: a rehearsal of this script, which says nothing about GPUs.

networks   each as one stage on the device, for each dtype: the largest difference from torch in float32 on the CPU, as
           a share of the outputs' range; single inputs and streams; torch's ways in the same dtype, in turns with it
pipelines  a network whose first layers a CPU worker has, then with a link of 1 Gbit/s and 1 ms to the device, then over
           two GPUs by each transport, where there are two: throughput as a share of 1 / (the slowest machine or link)
kernels    those that take longest of one network, and the share of the roofline that was measured here
torch      compiled by itself, which takes long, for as many of the networks as time is left for

Exits with 1 if a difference passes its limit, or something failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import WorkerDescription, describe
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.execution.nvcc import toolkit_version
from scripts.device_limits import limits_of
from scripts.gpu_pipelines import transports_between_gpus
from scripts.gpu_proof import CPU, DEVICE, HOST, LARGEST_DIFFERENCE, TIMEOUT_SECONDS, Prover
from scripts.gpu_tables import print_compiled, print_kernels, print_limits, print_networks, print_pipelines
from scripts.rounds import written
from scripts.timed_parts import TimedParts
from scripts.torch_ways import WAYS
from tests.models import torch_models
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit

NETWORKS = ("mobilenet_v2", "resnet50", "bert_base", "gpt2_small", "vit_b16", "vgg16")
"""The quickest to compile first: what is not reached is then as little as can be."""
PIPELINED = "resnet50"
"""Which is cut and whose kernels are shown, or else the first: its stages take longer than what goes on around them."""
SECONDS = 7.5 * 60.0
"""With what a part may take to end: within eight minutes."""
WIDTH = 170
"""Of the tables, also where they are written to a file."""
PIXELS, TOKENS = 224, 128
REHEARSED_PIXELS, REHEARSED_TOKENS = 64, 32
"""As small as all of it takes on two cores in time: the kernels are as many."""


def prove(
    arguments: argparse.Namespace,
    workers: LocalWorkers,
    timed: TimedParts,
    console: Console,
    results: dict[str, Any],
) -> None:
    """All parts, in the order in which they matter; what each finds is in ``results`` at once."""
    is_rehearsal = arguments.target == CPU
    models = torch_models.published_models(
        arguments.tokens or (REHEARSED_TOKENS if is_rehearsal else TOKENS),
        arguments.pixels or (REHEARSED_PIXELS if is_rehearsal else PIXELS),
    )
    networks = {name: models[name] for name in arguments.networks or NETWORKS}
    worker = describe(workers.endpoints[DEVICE], TIMEOUT_SECONDS)
    target = _target_of(arguments.target, worker)
    prover = Prover(target, arguments.threads, arguments.rounds, arguments.ways, workers)
    limits = limits_of(prover.device, arguments.threads)
    print_limits(console, worker, limits)
    results.update(
        target=target,
        rehearsal=prover.device == "cpu",
        devices=[asdict(each) for each in worker.cuda_devices],
        limits=asdict(limits),
        networks=(found := []),
        pipelines=(pipelines := []),
        kernels=(kernels := []),
        torch_compile=(by_torch := []),
    )
    for dtype in arguments.dtypes or LARGEST_DIFFERENCE:
        for batch in arguments.batches or ([1] if prover.device == "cpu" else [1, 32]):
            for name, build in networks.items():
                part = partial(prover.network, name, build, dtype, batch)
                timed.run("networks", f"{name}, {dtype}, batch {batch}", found, part)
    print_networks(console, found)
    name = PIPELINED if PIPELINED in networks else next(iter(networks))
    build = networks[name]
    for is_far in (False, True):
        what = f"{name} over two machines" + ", with a link between them" * is_far
        timed.run("pipelines", what, pipelines, partial(prover.pipeline, name, build, is_far))
    transports, why_no_others = transports_between_gpus(len(worker.cuda_devices), is_rehearsal=prover.device == "cpu")
    for transport in transports:
        what = f"{name} over two workers of the device's kind, by {transport}"
        timed.run("pipelines", what, pipelines, partial(prover.between_gpus, name, build, transport))
    results["between_gpus"] = why_no_others
    print_pipelines(console, pipelines)
    console.print(why_no_others or "two GPUs exchanged by all transports that there are", markup=False)
    timed.run("kernels", f"kernels of {name}", kernels, partial(prover.kernels, name, build, limits))
    print_kernels(console, kernels)
    for name, build in networks.items() if prover.device != "cpu" or "compile" in (arguments.ways or ()) else ():
        part = partial(prover.compiled_by_torch, name, build)
        timed.run("torch.compile", f"{name} by torch.compile", by_torch, part)
    print_compiled(console, by_torch, found)
    results["seconds"] = timed.seconds


def _target_of(asked: str | None, worker: WorkerDescription) -> str:
    """What is proven: what was asked for, or the architecture of its first GPU; the end where that cannot be."""
    if asked == CPU:
        return CPU
    if not worker.cuda_devices:
        sys.exit(f"there is nothing to prove: {worker.cuda.problem}. --target {CPU} rehearses this on the CPU")
    target = asked or worker.cuda_devices[0].arch
    problem = cuda_misfit(CudaNeeds(target, toolkit_version()), worker)
    if problem:
        sys.exit(f"there is nothing to prove with --target {target}: this machine {problem}")
    return target


def _target(text: str) -> str:
    if text != CPU and not re.fullmatch(r"sm_\d{2,3}[af]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture of GPUs, such as sm_90, and not {CPU}")
    return text


def _network(name: str) -> str:
    known = torch_models.published_models()
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _output(text: str) -> Path:
    """A path that can be written to."""
    path = Path(text)
    is_new = not os.path.lexists(path)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(torch_models.published_models())
    parser.add_argument("networks", nargs="*", type=_network, help=f"of {known}; six by default")
    parser.add_argument(
        "--target", type=_target, help="an architecture, such as sm_90, or llvm; by default what the GPU says it is"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=_count, default=max(1, cores // 2), help="of a CPU worker")
    parser.add_argument("--dtypes", nargs="*", choices=LARGEST_DIFFERENCE, help="both by default")
    parser.add_argument("--batches", nargs="*", type=_count, help="1 and 32 by default, of a CPU 1")
    parser.add_argument(
        "--ways", nargs="*", choices=WAYS, help="torch's; all by default, of a CPU those that are quick"
    )
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="in which it ends; %(default)s by default")
    small = "%s by default, of a CPU %s"
    parser.add_argument("--pixels", type=_count, help=f"the side of images; {small % (PIXELS, REHEARSED_PIXELS)}")
    parser.add_argument("--tokens", type=_count, help=small % (TOKENS, REHEARSED_TOKENS))
    parser.add_argument("--output", type=_output, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(WIDTH, Console().width))
    results: dict[str, Any] = {}
    timed = TimedParts(arguments.seconds, console, lambda: written(arguments.output, results))
    results.update(not_reached=timed.not_reached, failed=timed.failed)
    try:
        with LocalWorkers((HOST, DEVICE), threads=arguments.threads, start_timeout_seconds=TIMEOUT_SECONDS) as workers:
            prove(arguments, workers, timed, console, results)
    except TvmSplitError as error:  # of no part: a worker does not start, or does not say what it is
        timed.failed["workers"] = f"{type(error).__name__}: {error}"
        written(arguments.output, results)
        console.print(f"nothing can be proven: {error}", markup=False, highlight=False)
        return 1
    written(arguments.output, results)
    wrong = [
        f"{each['network']}: a difference of {each['difference']:.1e} of the range"
        for each in (*results["networks"], *results["pipelines"])
        if not each["difference"] <= each["largest_difference"]
    ]
    for text in (*wrong, *(f"{what}: {error}" for what, error in results["failed"].items())):
        console.print(f"wrong: {text}", markup=False)
    if results["not_reached"]:
        console.print(f"no time was left for: {'; '.join(results['not_reached'])}", markup=False)
    console.print(f"{'rehearsed on a CPU' if results['rehearsal'] else 'proven'} in {results['seconds']:.0f} s")
    return 1 if wrong or results["failed"] or not results["networks"] else 0


if __name__ == "__main__":
    sys.exit(main())
