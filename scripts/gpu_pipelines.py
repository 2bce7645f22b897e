"""Networks over two machines, for `prove_gpu`: what passes, and how much of what the slowest machine or link allows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.nccl_calls import nccl_library
from rpc_runtime.wire.channels import WorkerEndpoint
from scripts.streamed import median_run
from tvm_split.deployment.benchmark import bench

GPUS = ("gpu-0", "gpu-1")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def piped(
    bundle: tvm_split.Bundle,
    cluster: tvm_split.Cluster,
    network: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    stream_seconds: float,
    timeout_seconds: float,
) -> dict[str, Any]:
    """What a deployment gives and how fast, beside torch on the CPU and 1 / (its slowest machine or link)."""
    arrays = [each.numpy() for each in inputs]
    with tvm_split.deploy(bundle, cluster, timeout_seconds=timeout_seconds) as deployment:
        difference = difference_of(deployment.run(*arrays)[0], outputs_of(network, inputs))
        period = median_run(deployment, arrays)["seconds"] / 2
        report = bench(deployment, [arrays], rounds=1, micro_batches=max(20, int(stream_seconds / period)))
    machines = {each.machine: each.compute.measured or 0.0 for each in report.machines}
    wires = {f"{each.source} → {each.destination}": each.seconds.measured or 0.0 for each in report.links}
    per_second = 1 / (report.period.measured or float("nan"))
    return {
        "layers": {stage.machine: len(stage.layers) for stage in bundle.plan.stages},
        "difference": difference,
        "machine_seconds": machines,
        "link_seconds": wires,
        "transports": sorted({each.transport for each in report.links}),
        "per_second": per_second,
        "share_of_limit": per_second * max(*machines.values(), *wires.values()),
    }


def transports_between_gpus(gpus: int, *, is_rehearsal: bool) -> tuple[tuple[str, ...], str]:
    """By which two of this host's GPUs exchange tensors, and why not by others."""
    if is_rehearsal:
        return ("auto",), "this is a rehearsal, and CPUs do not exchange by nccl"
    if gpus < len(GPUS):
        return (), f"this machine has {gpus} GPU, and nothing is exchanged between two"
    try:
        nccl_library()
    except WorkerError as error:
        return ("grpc", "shm"), f"nothing is exchanged by nccl: {error}"
    return ("grpc", "shm", "nccl"), ""


@contextmanager
def one_gpu_each(threads: int, start_timeout_seconds: float) -> Iterator[dict[str, WorkerEndpoint]]:
    """Workers by the names of `GPUS`, of which each sees one GPU."""
    before = os.environ.get(VISIBLE)
    visible = before.split(",") if before else ["0", "1"]
    with ExitStack() as until_end:
        found = {}
        try:
            for gpu, own in zip(GPUS, visible, strict=False):
                os.environ[VISIBLE] = own
                workers = LocalWorkers([gpu], threads=threads, start_timeout_seconds=start_timeout_seconds)
                found[gpu] = until_end.enter_context(workers).endpoints[gpu]
        finally:
            os.environ.pop(VISIBLE)
            if before is not None:
                os.environ[VISIBLE] = before
        yield found


def outputs_of(network: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> np.ndarray:
    with torch.inference_mode():
        found = network(*inputs)
    if isinstance(found, dict):
        found = next(iter(found.values()))
    return np.asarray((found[0] if isinstance(found, tuple) else found).float().numpy())


def difference_of(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest, as a share of the range of what is expected."""
    return float(np.abs(found.astype(np.float32) - expected).max() / np.ptp(expected))
