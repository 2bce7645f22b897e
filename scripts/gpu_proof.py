"""What `prove_gpu` does with one network: its parts, each of which finds a dictionary, as JSON has it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.program.kernel_times import KernelSet, TimingEffort
from scripts.device_limits import Limits
from scripts.gpu_pipelines import GPUS, difference_of, one_gpu_each, outputs_of, piped
from scripts.rounds import Figures, in_turns, medians
from scripts.streamed import median_run
from scripts.torch_ways import QUICK, WAYS, Run, TorchWays
from tests.helpers.relay import Relay
from tests.models import torch_models
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.deployment.benchmark import bench
from tvm_split.profiling.kernels import target_code

LARGEST_DIFFERENCE = {"float32": 1e-3, "float16": 1e-2}
HOST, DEVICE = "host", "device"
CPU = "llvm"
HOSTS_SHARE = {"cpu": 0.4, "cuda": 0.1}
"""Of a network's layers, in a pipeline: as much as keeps both machines busy, roughly."""
LINK = {"bytes_per_second": 125e6, "latency_seconds": 0.001}
STREAM_SECONDS = {"cpu": 1.0, "cuda": 2.0}
TIMEOUT_SECONDS = 120.0


class Prover:
    """The machines of this host, of which one is proven."""

    def __init__(self, target: str, threads: int, rounds: int, ways: Sequence[str], workers: LocalWorkers) -> None:
        self.device = "cpu" if target == CPU else "cuda"
        torch.set_num_threads(threads)
        self._threads, self._rounds = threads, rounds
        self._ways = [each for each in ways or WAYS if each in QUICK]
        described = None if self.device == "cpu" else {"kind": "cuda", "arch": target}
        self._machines = (
            tvm_split.Machine(HOST, threads, endpoint=workers.endpoints[HOST]),
            tvm_split.Machine(DEVICE, threads, described, endpoint=workers.endpoints[DEVICE]),
        )

    def network(self, name: str, build: torch_models.PublishedModel, dtype: str, batch: int) -> dict[str, Any]:
        """One network as one stage on the device, beside torch."""
        network, inputs = build[0](), [torch.cat([each] * batch) for each in build[1]]
        expected = outputs_of(network, inputs)
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
        with tvm_split.deploy(bundle, cluster, timeout_seconds=TIMEOUT_SECONDS) as deployment:
            difference = difference_of(deployment.run(*arrays)[0], expected)
            runs["ours"] = lambda: median_run(deployment, arrays)
            for way, run in TorchWays(network, inputs, self.device).each(self._ways):
                if isinstance(run, str):
                    failed[way] = run
                else:
                    runs[way] = partial(_median_of, run)
            times = medians(in_turns(runs, self._rounds))
            count = max(8, int(STREAM_SECONDS[self.device] / times["ours"]["seconds"]))
            report = bench(deployment, [arrays], rounds=1, micro_batches=count)
        (machine,) = report.machines
        return {
            "network": name,
            "dtype": dtype,
            "batch": batch,
            "difference": difference,
            "largest_difference": LARGEST_DIFFERENCE[dtype],
            "seconds": {side: figures["seconds"] for side, figures in times.items()},
            "compute_seconds": machine.compute.measured,
            "per_second": batch / (report.period.measured or float("nan")),
            "compile_seconds": compile_seconds,
            "failed": failed,
        }

    def pipeline(self, name: str, build: torch_models.PublishedModel, is_far: bool) -> dict[str, Any]:
        """A network over the CPU's worker, which has its first layers, and the device's."""
        network, inputs = build[0](), build[1]
        model = tvm_split.load_model(network, inputs, name=name)
        with ExitStack() as until_end:
            links = []
            for source, end in ((HOST, DEVICE), (DEVICE, HOST)) if is_far else ():
                address = next(each.address for each in self._machines if each.name == end)
                relay = until_end.enter_context(Relay(str(address), **LINK))
                links.append(tvm_split.Link(source, end, **LINK, address=relay.address))
            # By hand: to measure what the two machines do to each piece takes minutes, and any cut has a slowest stage.
            cut = model.layer_names[int(len(model.layer_names) * HOSTS_SHARE[self.device])]
            bundle, cluster = self._bundle(model, tuple(links), split={HOST: [model.layer_names[0]], DEVICE: [cut]})
            found = self._piped(bundle, cluster, network, inputs)
        return {"network": name, "far": is_far, **found}

    def between_gpus(self, name: str, build: torch_models.PublishedModel, transport: str) -> dict[str, Any]:
        """A network over two of this host's GPUs, half of its layers each."""
        network, inputs = build[0](), build[1]
        model = tvm_split.load_model(network, inputs, name=name)
        with one_gpu_each(self._threads, TIMEOUT_SECONDS) as endpoints:
            described = self._machines[1].target
            machines = tuple(tvm_split.Machine(gpu, self._threads, described, endpoint=endpoints[gpu]) for gpu in GPUS)
            cluster = tvm_split.Cluster("remote", machines, (tvm_split.Link(*GPUS, transport=transport),))
            split = dict(zip(GPUS, ([model.layer_names[at]] for at in (0, len(model.layer_names) // 2)), strict=True))
            bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split), verify=False)
            found = self._piped(bundle, cluster, network, inputs)
        return {"network": name, "far": False, **found}

    def _piped(
        self,
        bundle: tvm_split.Bundle,
        cluster: tvm_split.Cluster,
        network: torch.nn.Module,
        inputs: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        found = piped(bundle, cluster, network, inputs, STREAM_SECONDS[self.device], TIMEOUT_SECONDS)
        return {"largest_difference": LARGEST_DIFFERENCE["float32"], **found}

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


def _median_of(run: Run) -> Figures:
    run()
    found = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return {"seconds": statistics.median(found)}
