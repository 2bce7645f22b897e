"""Benchmark networks on a GPU: their error, their speed beside torch, pipelines, and kernels.

``--set target=llvm`` replaces the GPU's worker by a CPU worker, to test this case; the results say nothing about GPUs.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import torch

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.client.worker_client import describe
from rpc_runtime.program.measurements import KernelSet, TimingEffort
from scripts.harness import Case, Limit, Ratio, Setup, Side, median_seconds
from scripts.processes import Figures, Prepared
from scripts.sides import RUNS, batched, by_torch, difference, loaded, network, torch_outputs
from tests.helpers.relay import Relay
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.profiling.kernels import target_code

OURS, TORCH = "tvm-split", "torch"
WAYS = ("eager", "compile")
"""The ways to run a network with torch."""
NETWORKS = ("mobilenet_v2", "resnet50", "bert_base", "gpt2_small", "vit_b16", "vgg16")
"""The networks, those that compile fastest first."""
PIPELINED = "resnet50"
LARGEST_DIFFERENCE = {"float32": 1e-3, "float16": 1e-2}
HOST, DEVICE, GPUS = "host", "device", ("gpu-0", "gpu-1")
CPU = "llvm"
LINK: Mapping[str, Any] = {"bytes_per_second": 125e6, "latency_seconds": 0.001}
TIMEOUT_SECONDS = 120.0
SIDE, COPIED_BYTES = 8192, 1 << 30
"""The width of the matrices and the size of the copies that measure the device's peaks."""
SHOWN_KERNELS = 12


def target_of(target: str, workers: LocalWorkers, machine: str) -> dict[str, Any] | None:
    """Return the machine's target, with the given architecture or that of its first GPU; None for a CPU."""
    if target == CPU:
        return None
    description = describe(workers.endpoints[machine], TIMEOUT_SECONDS)
    if not description.cuda_devices:
        raise RuntimeError(f"there is no GPU: {description.cuda.problem}; --set target={CPU} rehearses this on the CPU")
    return {"kind": "cuda", "arch": target or description.cuda_devices[0].arch}


@contextmanager
def workers_of(names: Sequence[str], target: str, threads: int) -> Iterator[tuple[tvm_split.Machine, ...]]:
    """Start workers on this host; each of those named in `GPUS` sees one GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with ExitStack() as until_end:
        machines = []
        for name in names:
            if name in GPUS:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible[min(GPUS.index(name), len(visible) - 1)]
            workers = LocalWorkers([name], threads=threads, start_timeout_seconds=TIMEOUT_SECONDS)
            until_end.enter_context(workers)
            described = None if name == HOST else target_of(target, workers, name)
            machines.append(tvm_split.Machine(name, threads, described, endpoint=workers.endpoints[name]))
        yield tuple(machines)


@contextmanager
def on_machines(
    names: Sequence[str],
    target: str,
    threads: int,
    name: str = PIPELINED,
    dtype: str = "float32",
    batch: int = 1,
    transport: str = "auto",
    is_far: bool = False,
    **sizes: int,
) -> Iterator[Prepared]:
    """Run a network as a stage on each machine; the difference is relative to torch in float32 on the CPU.

    The share is relative to the rate of the slowest machine or link.
    """
    module, inputs = network(name, **sizes)
    expected = torch_outputs(module, batched(inputs, batch, torch.float32))
    kind = getattr(torch, dtype)
    inputs = batched(inputs, batch, kind)
    model = tvm_split.load_model(module.to(kind), inputs, name=name)
    arrays = [tensor.numpy() for tensor in inputs]
    with ExitStack() as until_end:
        machines = until_end.enter_context(workers_of(names, target, threads))
        links = [] if is_far else [tvm_split.Link(*ends, transport=transport) for ends in pairwise(names)]
        for source, end in permutations(machines, 2) if is_far else ():
            relay = until_end.enter_context(Relay(str(end.address), **LINK))
            links.append(tvm_split.Link(source.name, end.name, **LINK, address=relay.address))
        cluster = tvm_split.Cluster(machines, tuple(links))
        # Split by hand, since profiling takes minutes: 10 % keeps a CPU as busy as a GPU, otherwise halves.
        share = 0.1 if names[0] == HOST and target != CPU else 0.5
        firsts = model.layer_names[0], model.layer_names[int(len(model.layer_names) * share)]
        plan = tvm_split.plan(model, cluster, split={name: [first] for name, first in zip(names, firsts, strict=False)})
        start = time.perf_counter()
        # No verification, which would compile the GPU's stages again for the CPU.
        bundle = tvm_split.compile(model, plan, verify=False)
        compile_seconds = time.perf_counter() - start
        deployment = until_end.enter_context(tvm_split.deploy(bundle, cluster, timeout_seconds=TIMEOUT_SECONDS))
        off = difference(deployment.run(*arrays)[:1], expected[:1]) / LARGEST_DIFFERENCE[dtype]

        def measure() -> Figures:
            seconds = median_seconds(lambda: deployment.run(*arrays), RUNS)
            count = len(names) * max(10, int(1 / seconds))
            report = tvm_split.bench(deployment, [arrays], rounds=1, micro_batches=count)
            computing = [machine.compute.measured or 0.0 for machine in report.machines]
            sending = [link.seconds.measured or 0.0 for link in report.links]
            period = report.period.measured or float("nan")
            return {
                "seconds": seconds,
                "compute_seconds": sum(computing),
                "per_second": batch / period,
                "share_of_slowest": max(*computing, *sending) / period,
                "difference_over_limit": off,
            }

        layers = {stage.machine: len(stage.layers) for stage in plan.stages}
        facts = {"target": plan.machines[-1].target, "compile_seconds": round(compile_seconds, 1), "layers": layers}
        yield Prepared(measure, facts)


def device_limits(device: str) -> tuple[float, float]:
    """Measure operations per second (multiplication and addition are two) and bytes per second, with torch."""
    scale = 1 if device == "cuda" else 8
    x = torch.randn(SIDE // scale, SIDE // scale, device=device)
    source = torch.zeros(COPIED_BYTES // scale, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def seconds(run: Callable[[], object]) -> float:
        def synchronized() -> None:
            run()
            if device == "cuda":
                torch.cuda.synchronize()

        return median_seconds(synchronized, 7)

    return (
        2.0 * len(x) ** 3 / seconds(lambda: torch.mm(x, x)),
        2.0 * source.numel() / seconds(lambda: copy.copy_(source)),
    )


@contextmanager
def kernels(name: str, target: str, threads: int, **sizes: int) -> Iterator[Prepared]:
    """Measure every kernel of a network alone on the device, beside the measured roofline."""
    _, _, model = loaded(name, **sizes)
    peak, bandwidth = device_limits("cpu" if target == CPU else "cuda")
    blobs = BlobFolder.temporary()
    with workers_of([DEVICE], target, threads) as machines:
        endpoint = machines[0].endpoint
        assert endpoint is not None
        plan = tvm_split.plan(model, tvm_split.Cluster(machines), split={DEVICE: [model.layer_names[0]]})
        code = target_code(model, plan.machine(DEVICE).target, None)
        digests = [digest for digest in code.distinct if digest not in code.untimeable]
        timed = tuple(code.distinct[digest].timed for digest in digests)
        kernel_set = KernelSet(DEVICE, code.device, code.build(frozenset(digests), blobs), timed, code.weight_bytes)
        with RemoteKernels(endpoint, TIMEOUT_SECONDS) as session:
            session.load(kernel_set, blobs.path)
            times = dict(zip(digests, session.measure(TimingEffort(7, 0.5, 60.0)), strict=True))
    spent, ideal, failed = {}, {}, {}
    for digest, call in code.distinct.items():
        if digest in times and times[digest].error:
            failed[call.kernel.function] = times[digest].error
        elif digest in times:
            calls = sum(call.digest == digest for call in code.calls)
            least = max(call.kernel.operations / peak, call.kernel.moved_bytes / bandwidth)
            key = f"{call.kernel.function} ({call.kernel.rule}, {calls} calls)"
            spent[key], ideal[key] = times[digest].seconds * calls, least * calls
    longest = sorted(spent, key=lambda key: -spent[key])[:SHOWN_KERNELS]
    shown = {key: f"{spent[key] * 1e6:.0f} µs, {ideal[key] / spent[key]:.0%} of its roofline" for key in longest}
    whole = sum(spent.values())
    figures = {"kernel_seconds": whole, "share_of_roofline": sum(ideal.values()) / whole, "failed": len(failed)}
    yield Prepared(lambda: figures, {**shown, **failed})


def _settings(setup: Setup) -> dict[str, Any]:
    """Return the target and the sizes that the options give, and the threads of each worker."""
    values = setup.options.values
    target = values.get("target", "")
    pixels, tokens = (64, 32) if target == CPU else (224, 128)
    return {
        "target": target,
        "threads": max(1, len(os.sched_getaffinity(0)) // 2),
        "pixels": int(values.get("pixels", pixels)),
        "tokens": int(values.get("tokens", tokens)),
    }


def beside_torch(name: str, dtype: str, batch: int, setup: Setup) -> Sequence[Side]:
    settings = _settings(setup)
    is_gpu = settings["target"] != CPU
    if batch > 1 and not is_gpu:
        return []
    arguments = {"name": name, "dtype": dtype, "batch": batch, **settings}
    processes = {OURS: setup.begin(on_machines, names=[DEVICE], **arguments)}
    del arguments["target"], arguments["threads"]  # torch takes all cores
    device = "cuda" if is_gpu else "cpu"
    for way in WAYS if is_gpu and dtype == "float32" else WAYS[:1]:
        processes[f"{TORCH}, {way}"] = setup.begin(by_torch, way=way, device=device, **arguments)
    # All prepare at the same time, since this takes longer than what is measured afterwards.
    facts = {title: process.ready() for title, process in processes.items()}
    return [Side(title, process.measure, facts[title]) for title, process in processes.items()]


def piped(names: Sequence[str], transport: str, is_far: bool, setup: Setup) -> Sequence[Side]:
    settings = _settings(setup)
    if names == GPUS and settings["target"] != CPU and torch.cuda.device_count() < len(GPUS):
        return []
    if settings["target"] == CPU:
        transport = "auto"
    return [setup.side(OURS, on_machines, names=names, transport=transport, is_far=is_far, **settings)]


CASE = Case(
    subjects={
        f"kernels of {PIPELINED}": lambda setup: [setup.side(OURS, kernels, name=PIPELINED, **_settings(setup))],
        f"{PIPELINED} over two machines": partial(piped, (HOST, DEVICE), "auto", False),
        f"{PIPELINED} over two machines, 1 Gbit/s and 1 ms": partial(piped, (HOST, DEVICE), "auto", True),
        **{
            f"{PIPELINED} between two GPUs by {transport}": partial(piped, GPUS, transport, False)
            for transport in ("grpc", "shm", "nccl")
        },
        **{
            f"{name}, {dtype}, batch {batch}": partial(beside_torch, name, dtype, batch)
            for dtype, batch in (("float32", 1), ("float16", 1), ("float16", 32))
            for name in NETWORKS
        },
    },
    ratios=tuple(Ratio("seconds", OURS, f"{TORCH}, {way}") for way in WAYS),
    limits=(Limit("difference_over_limit", 1.0), Limit("failed", 0.0)),
    rounds=3,
)
