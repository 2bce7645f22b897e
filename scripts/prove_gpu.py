"""Six well-known networks on a GPU: right, how fast beside torch's ways and the device's limits, and in a pipeline.

Needs no network, and ends within its time: what was not reached is told as such. With ``--target llvm`` a CPU worker
stands for the GPU's: a rehearsal of this script, which says nothing about GPUs.

networks   each as one stage on the device, for each dtype: the largest difference from torch in float32 on the CPU, as
           a share of the outputs' range; single inputs and streams; torch's ways in the same dtype, in turns with it
pipelines  a network whose first layers a CPU worker has, then with a link of 1 Gbit/s and 1 ms to the device:
           throughput as a share of 1 / (the slowest machine or link)
kernels    those that take longest of one network, and the share of the roofline that was measured here
torch      compiled by itself, which takes long, for as many of the networks as time is left for

Exits with 1 if a difference passes its limit, or something failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import tvm_split
from scripts.device_limits import Limits, limits_of
from scripts.gpu_tables import AS_GRAPH, print_compiled, print_kernels, print_limits, print_networks, print_pipelines
from scripts.rounds import Figures, in_turns, medians, written
from scripts.streamed import median_run
from scripts.timed_parts import TimedParts
from scripts.torch_ways import QUICK, WAYS, Run, TorchWays
from tests.helpers.relay import Relay
from tests.models import torch_models
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.deployment.benchmark import bench
from tvm_split.measuring.target_code import target_code
from tvm_split.rpc_runtime.client.client import WorkerDescription, describe
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.client.remote_kernels import RemoteKernels
from tvm_split.rpc_runtime.errors import TvmSplitError
from tvm_split.rpc_runtime.execution.nvcc import toolkit_version
from tvm_split.rpc_runtime.execution.switches import CUDA_GRAPHS
from tvm_split.rpc_runtime.program.kernel_times import KernelSet, TimingEffort

NETWORKS = ("mobilenet_v2", "resnet50", "bert_base", "gpt2_small", "vit_b16", "vgg16")
"""The quickest to compile first: what is not reached is then as little as can be."""
LARGEST_DIFFERENCE = {"float32": 1e-3, "float16": 1e-2}
SECONDS = 7.5 * 60.0
"""With what a part may take to end: within eight minutes."""
HOST, DEVICE = "host", "device"
CPU = "llvm"
HOSTS_SHARE = {"cpu": 0.4, "cuda": 0.1}
"""Of a network's layers, in a pipeline: as much as keeps both machines busy, roughly."""
LINK = {"bytes_per_second": 125e6, "latency_seconds": 0.001}
STREAM_SECONDS = 2.0
TIMEOUT_SECONDS = 120.0


class Prover:
    """The machines of this host, of which one is proven. A part of the proof is a dictionary, as JSON has it."""

    def __init__(
        self,
        target: str,
        threads: int,
        rounds: int,
        ways: Sequence[str],
        workers: LocalWorkers,
        graphs: LocalWorkers,
    ) -> None:
        self.device = "cpu" if target == CPU else "cuda"
        torch.set_num_threads(threads)
        self._threads, self._rounds = threads, rounds
        self._ways = [each for each in ways or WAYS if each in QUICK]
        described = None if self.device == "cpu" else {"kind": "cuda", "arch": target}
        self._machines = (
            tvm_split.Machine(HOST, threads, endpoint=workers.endpoints[HOST]),
            tvm_split.Machine(DEVICE, threads, described, endpoint=workers.endpoints[DEVICE]),
        )
        with_graphs = tvm_split.Machine(DEVICE, threads, described, endpoint=graphs.endpoints[DEVICE])
        self._with_graphs = tvm_split.Cluster("remote", (self._machines[0], with_graphs), ())

    def network(self, name: str, build: torch_models.PublishedModel, dtype: str, batch: int) -> dict[str, Any]:
        """One network as one stage on the device, beside torch."""
        network, inputs = build[0](), [torch.cat([each] * batch) for each in build[1]]
        expected = _outputs_of(network, inputs)
        kind = getattr(torch, dtype)
        network = network.to(kind)
        inputs = [each.to(kind) if each.is_floating_point() else each for each in inputs]
        model = tvm_split.load_model(network, tuple(inputs), name=name)
        start = time.perf_counter()
        bundle, cluster = self._bundle(model, split={DEVICE: [model.layer_names[0]]})
        compile_seconds = time.perf_counter() - start
        arrays = [each.numpy() for each in inputs]
        runs: dict[str, Callable[[], Figures]] = {}
        failed = {}
        with (
            tvm_split.deploy(bundle, cluster, timeout_seconds=TIMEOUT_SECONDS) as deployment,
            tvm_split.deploy(bundle, self._with_graphs, timeout_seconds=TIMEOUT_SECONDS) as as_graph,
        ):
            difference = max(_difference(each.run(*arrays)[0], expected) for each in (deployment, as_graph))
            (cuda_graph,) = {stage.cuda_graph for stage in as_graph.stats().stages}
            runs["ours"] = lambda: median_run(deployment, arrays)
            runs[AS_GRAPH] = lambda: median_run(as_graph, arrays)
            for way, run in TorchWays(network, inputs, self.device).each(self._ways):
                if isinstance(run, str):
                    failed[way] = run
                else:
                    runs[way] = partial(_median_of, run)
            times = medians(in_turns(runs, self._rounds))
            count = max(8, int(STREAM_SECONDS / times["ours"]["seconds"]))
            report = bench(deployment, [arrays], rounds=1, micro_batches=count)
            graphs_report = bench(as_graph, [arrays], rounds=1, micro_batches=count)
        (machine,), (graphs_machine,) = report.machines, graphs_report.machines
        return {
            "network": name,
            "dtype": dtype,
            "batch": batch,
            "difference": difference,
            "largest_difference": LARGEST_DIFFERENCE[dtype],
            "seconds": {side: figures["seconds"] for side, figures in times.items()},
            "compute_seconds": machine.compute.measured,
            "per_second": batch / (report.period.measured or float("nan")),
            "cuda_graph": cuda_graph,
            "graphs_compute_seconds": graphs_machine.compute.measured,
            "graphs_per_second": batch / (graphs_report.period.measured or float("nan")),
            "compile_seconds": compile_seconds,
            "failed": failed,
        }

    def pipeline(self, name: str, build: torch_models.PublishedModel, is_far: bool) -> dict[str, Any]:
        """A network over the CPU's worker, which has its first layers, and the device's."""
        network, inputs = build[0](), build[1]
        model = tvm_split.load_model(network, inputs, name=name)
        arrays = [each.numpy() for each in inputs]
        with ExitStack() as until_end:
            links = []
            for source, end in ((HOST, DEVICE), (DEVICE, HOST)) if is_far else ():
                address = next(each.address for each in self._machines if each.name == end)
                relay = until_end.enter_context(Relay(str(address), **LINK))
                links.append(tvm_split.Link(source, end, **LINK, address=relay.address))
            # By hand: to measure what the two machines do to each piece takes minutes, and any cut has a slowest stage.
            cut = model.layer_names[int(len(model.layer_names) * HOSTS_SHARE[self.device])]
            bundle, cluster = self._bundle(model, tuple(links), split={HOST: [model.layer_names[0]], DEVICE: [cut]})
            deployment = until_end.enter_context(tvm_split.deploy(bundle, cluster, timeout_seconds=TIMEOUT_SECONDS))
            difference = _difference(deployment.run(*arrays)[0], _outputs_of(network, inputs))
            period = median_run(deployment, arrays)["seconds"] / 2
            report = bench(deployment, [arrays], rounds=1, micro_batches=max(20, int(STREAM_SECONDS / period)))
        machines = {each.machine: each.compute.measured or 0.0 for each in report.machines}
        wires = {f"{each.source} → {each.destination}": each.seconds.measured or 0.0 for each in report.links}
        per_second = 1 / (report.period.measured or float("nan"))
        return {
            "network": name,
            "far": is_far,
            "layers": {stage.machine: len(stage.layers) for stage in bundle.plan.stages},
            "difference": difference,
            "largest_difference": LARGEST_DIFFERENCE["float32"],
            "machine_seconds": machines,
            "link_seconds": wires,
            "transports": sorted({each.transport for each in report.links}),
            "per_second": per_second,
            "share_of_limit": per_second * max(*machines.values(), *wires.values()),
        }

    def kernels(self, name: str, build: torch_models.PublishedModel, limits: Limits) -> dict[str, Any]:
        """Every kernel of a network by itself on the device."""
        model = tvm_split.load_model(build[0](), build[1], name=name)
        bundle, _ = self._bundle(model, split={DEVICE: [model.layer_names[0]]})
        code = target_code(model, bundle.plan.machine(DEVICE).target, None)
        timeable = [digest for digest in code.distinct if digest not in code.untimeable]
        blobs = BlobFolder.temporary()
        kernels = tuple(map(code.timed, timeable))
        wanted = KernelSet(DEVICE, code.device, code.build(timeable, blobs), kernels, code.weight_bytes)
        endpoint = self._machines[1].endpoint
        assert endpoint is not None
        with RemoteKernels(endpoint, TIMEOUT_SECONDS) as session:
            session.load(wanted, blobs.path)
            times = dict(zip(timeable, session.measure(TimingEffort(7, 0.5, 60.0)), strict=True))
        found = []
        for digest, call in code.distinct.items():
            time_of = times.get(digest)
            if time_of is not None and not time_of.error:
                work = (call.kernel.operations, call.kernel.moved_bytes)
                found.append(
                    {
                        "function": call.kernel.function,
                        "rule": call.kernel.rule,
                        "calls": sum(each.digest == digest for each in code.calls),
                        "seconds": time_of.seconds,
                        "share_of_roofline": limits.share(*work, time_of.seconds, "float32"),
                    }
                )
        failed = {code.distinct[digest].kernel.function: each.error for digest, each in times.items() if each.error}
        return {"network": name, "kernels": found, "failed": failed}

    def compiled_by_torch(self, name: str, build: torch_models.PublishedModel) -> dict[str, Any]:
        """One network by torch's own compiler."""
        ways = TorchWays(build[0](), build[1], self.device).each(["compile"])
        found: dict[str, Any] = {"network": name, "dtype": "float32", "batch": 1}
        for _, run in ways:
            found |= {"failed": run} if isinstance(run, str) else _median_of(run)
        return found

    def _bundle(
        self, model: tvm_split.Model, links: tuple[tvm_split.Link, ...] = (), **plan: Any
    ) -> tuple[tvm_split.Bundle, tvm_split.Cluster]:
        cluster = tvm_split.Cluster("remote", self._machines, links)
        # Not compared in this process: what is compiled for a GPU would be compiled again for the CPU.
        return tvm_split.compile(model, tvm_split.plan(model, cluster, **plan), verify=False), cluster


def _outputs_of(network: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> np.ndarray:
    with torch.inference_mode():
        found = network(*inputs)
    if isinstance(found, dict):
        found = next(iter(found.values()))
    return np.asarray((found[0] if isinstance(found, tuple) else found).float().numpy())


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest, as a share of the range of what is expected."""
    return float(np.abs(found.astype(np.float32) - expected).max() / np.ptp(expected))


def _median_of(run: Run) -> Figures:
    run()
    found = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return {"seconds": statistics.median(found)}


def prove(
    arguments: argparse.Namespace,
    workers: LocalWorkers,
    graphs: LocalWorkers,
    timed: TimedParts,
    console: Console,
    results: dict[str, Any],
) -> None:
    """All parts, in the order in which they matter; what each finds is in ``results`` at once."""
    models = torch_models.published_models(arguments.tokens, arguments.pixels)
    networks = {name: models[name] for name in arguments.networks or NETWORKS}
    worker = describe(workers.endpoints[DEVICE], TIMEOUT_SECONDS)
    target = _target_of(arguments.target, worker)
    prover = Prover(target, arguments.threads, arguments.rounds, arguments.ways, workers, graphs)
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
    dtypes = arguments.dtypes or (["float32"] if prover.device == "cpu" else list(LARGEST_DIFFERENCE))
    for dtype in dtypes:
        for batch in arguments.batches or ([1] if prover.device == "cpu" else [1, 32]):
            for name, build in networks.items():
                part = partial(prover.network, name, build, dtype, batch)
                timed.run("networks", f"{name}, {dtype}, batch {batch}", found, part)
    print_networks(console, found)
    name, build = next(iter(networks.items()))
    for is_far in (False, True):
        what = f"{name} over two machines" + ", with a link between them" * is_far
        timed.run("pipelines", what, pipelines, partial(prover.pipeline, name, build, is_far))
    print_pipelines(console, pipelines)
    timed.run("kernels", f"kernels of {name}", kernels, partial(prover.kernels, name, build, limits))
    print_kernels(console, kernels)
    for name, build in networks.items() if prover.device != "cpu" or "compile" in (arguments.ways or ()) else ():
        part = partial(prover.compiled_by_torch, name, build)
        timed.run("torch.compile", f"{name} by torch.compile", by_torch, part)
    print_compiled(console, by_torch, found)
    results["seconds"] = timed.seconds


def _workers(names: tuple[str, ...], threads: int, *, graphs: bool) -> LocalWorkers:
    """Workers that record GPUs' stages as CUDA graphs, or do not, whatever this process's environment says."""
    switched = {CUDA_GRAPHS.variable: str(int(graphs))}
    return LocalWorkers(names, threads=threads, start_timeout_seconds=TIMEOUT_SECONDS, environment=switched)


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
    parser.add_argument("--dtypes", nargs="*", choices=LARGEST_DIFFERENCE, help="both by default, of a CPU float32")
    parser.add_argument("--batches", nargs="*", type=_count, help="1 and 32 by default, of a CPU 1")
    parser.add_argument(
        "--ways", nargs="*", choices=WAYS, help="torch's; all by default, of a CPU those that are quick"
    )
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="in which it ends; %(default)s by default")
    parser.add_argument("--pixels", type=_count, default=224, help="the side of images")
    parser.add_argument("--tokens", type=_count, default=128)
    parser.add_argument("--output", type=_output, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(120, Console().width))
    results: dict[str, Any] = {}
    timed = TimedParts(arguments.seconds, console, lambda: written(arguments.output, results))
    results.update(not_reached=timed.not_reached, failed=timed.failed)
    try:
        with (
            _workers((HOST, DEVICE), arguments.threads, graphs=False) as workers,
            _workers((DEVICE,), arguments.threads, graphs=True) as graphs,
        ):
            prove(arguments, workers, graphs, timed, console, results)
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
