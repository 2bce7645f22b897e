"""Sides for several cases: one network, run in one process. They use only public names of `tvm_split`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import tvm_split
from scripts.harness import median_seconds
from scripts.processes import Figures, Prepared
from tests.helpers.relay import Relay
from tests.models import torch_models

if TYPE_CHECKING:
    from rpc_runtime.client.local_workers import LocalWorkers
    from rpc_runtime.wire.channels import WorkerEndpoint

RUNS = 5
"""The number of single runs for one figure, which is their median."""
FILL = 6
"""The number of first results of a stream that do not count."""


def network(name: str, **sizes: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a published network, and example inputs; ``sizes`` may give other ``tokens`` and ``pixels``."""
    build, inputs = torch_models.published_models(**sizes)[name]
    return build(), inputs


def loaded(name: str, **sizes: int) -> tuple[nn.Module, list[np.ndarray], tvm_split.Model]:
    """Return a published network, its example inputs as arrays, and the model that is imported from both."""
    module, inputs = network(name, **sizes)
    return module, [tensor.numpy() for tensor in inputs], tvm_split.load_model(module, inputs, name=name)


def stages_text(plan: tvm_split.Plan) -> str:
    return " | ".join(f"{', '.join(stage.machines)}: {stage.layers[0]} to {stage.layers[-1]}" for stage in plan.stages)


def predicted_latency(plan: tvm_split.Plan) -> float | None:
    return None if plan.prediction is None else plan.prediction.latency_seconds


def timed(run: Callable[[], object], runs: int = RUNS) -> Callable[..., Figures]:
    """Return a function that measures the seconds of a call of ``run`` or, given ``seconds``, the calls per second."""

    def measure(seconds: float = 0.0) -> Figures:
        if not seconds:
            return {"seconds": median_seconds(run, runs)}
        start, count = time.perf_counter(), 0
        while not count or time.perf_counter() - start < seconds:
            run()
            count += 1
        return {"per_second": count / (time.perf_counter() - start)}

    return measure


def arrivals(deployment: Any, inputs: Sequence[Any], seconds: float) -> list[float]:
    """Feed a stream for ``seconds``, with at least three times `FILL` inputs; return when its results arrived."""
    end = time.perf_counter() + seconds

    def fed() -> Iterator[Sequence[Any]]:
        count = 0
        while count < 3 * FILL or time.perf_counter() < end:
            yield inputs
            count += 1

    return [time.perf_counter() for _ in deployment.stream(fed())]


def rate(times: Sequence[float]) -> float:
    """Return the results per second after the first `FILL`."""
    return (len(times) - FILL) / (times[-1] - times[FILL - 1])


def difference(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference between outputs, divided by the range of the expected output."""
    pairs = zip(outputs, expected, strict=True)
    return max(float(np.abs(output.astype(np.float32) - right).max() / np.ptp(right)) for output, right in pairs)


def torch_outputs(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return a torch module's outputs in float32, in the order of a `tvm_split.Model`."""
    with torch.inference_mode():
        leaves = torch.utils._pytree.tree_leaves(module(*inputs))
    return [leaf.float().numpy() for leaf in leaves]


@contextmanager
def in_process(name: str, threads: int, database: str | None = None) -> Iterator[Prepared]:
    """Run the network with this project's kernels, without workers; ``database`` has kernels that were tuned."""
    module, inputs = network(name)
    arrays = [tensor.numpy() for tensor in inputs]
    model = tvm_split.load_model(module, inputs, name=name)
    cluster = tvm_split.Cluster.in_process(1, threads=threads)
    start = time.perf_counter()
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False, database=database)
    compile_seconds = time.perf_counter() - start
    with tvm_split.deploy(bundle, cluster) as deployment:
        off = difference(deployment.run(*arrays), torch_outputs(module, inputs))
        facts = {"compile_seconds": round(compile_seconds, 1), "difference_from_torch": f"{off:.1e}"}
        yield Prepared(timed(lambda: deployment.run(*arrays)), facts)


@contextmanager
def by_onnxruntime(name: str, threads: int, cores: Sequence[int] = ()) -> Iterator[Prepared]:
    """Run the network with onnxruntime, in one session, on ``cores`` if any are given."""
    import onnxruntime

    if cores:
        os.sched_setaffinity(0, set(cores))
    module, inputs = network(name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        torch.onnx.export(module, inputs, str(path), dynamo=False)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {node.name: tensor.numpy() for node, tensor in zip(session.get_inputs(), inputs, strict=True)}
    yield Prepared(timed(lambda: session.run(None, feed)))


def batched(inputs: Sequence[torch.Tensor], batch: int, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return so many times the inputs, with floating-point numbers of this kind."""
    repeated = (torch.cat([tensor] * batch) for tensor in inputs)
    return tuple(tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in repeated)


@contextmanager
def by_torch(
    name: str,
    threads: int | None = None,
    way: str = "eager",
    dtype: str = "float32",
    batch: int = 1,
    device: str = "cpu",
    **sizes: int,
) -> Iterator[Prepared]:
    """Run the network in one of torch's ways, from inputs to outputs in host memory; on CPUs in the faster layout."""
    module, inputs = network(name, **sizes)
    kind = getattr(torch, dtype)
    module, inputs = module.to(device, kind), batched(inputs, batch, kind)
    if device == "cpu" and inputs[0].ndim == 4:
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(tensor.to(memory_format=torch.channels_last) for tensor in inputs)
    if threads is not None:
        torch.set_num_threads(threads)
    if way == "compile":
        module = torch.compile(module)

    def run() -> None:
        with torch.inference_mode():
            for output in torch.utils._pytree.tree_leaves(module(*(tensor.to(device) for tensor in inputs))):
                output.cpu()

    yield Prepared(timed(run))


def local_workers(names: Sequence[str], until_end: ExitStack) -> LocalWorkers:
    """Start worker processes with one core each and a new cache."""
    # Other checkouts, whose sides import this module too, have other modules.
    from rpc_runtime.client.local_workers import LocalWorkers
    from rpc_runtime.scratch import ScratchFolder

    cache = until_end.enter_context(ScratchFolder("bench"))
    return until_end.enter_context(LocalWorkers(names, threads=1, cache=cache.path))


def cluster_of(endpoints: Mapping[str, WorkerEndpoint], links: Sequence[tvm_split.Link] = ()) -> tvm_split.Cluster:
    machines = tuple(tvm_split.Machine(name, 1, endpoint=endpoint) for name, endpoint in endpoints.items())
    return tvm_split.Cluster(machines, tuple(links))


def links_with_relays(
    endpoints: Mapping[str, WorkerEndpoint], until_end: ExitStack, **wire: float
) -> tuple[tvm_split.Link, ...]:
    """Return links between all machines, through a relay in front of each machine that delays both directions."""
    far = {
        name: until_end.enter_context(Relay(endpoint.address, **wire)).address for name, endpoint in endpoints.items()
    }
    return tuple(tvm_split.Link(source, end, address=far[end]) for source, end in permutations(endpoints, 2))


def deployed(
    model: tvm_split.Model, plan: tvm_split.Plan, cluster: tvm_split.Cluster, until_end: ExitStack
) -> tvm_split.Deployment:
    bundle = tvm_split.compile(model, plan, verify=False)
    return until_end.enter_context(tvm_split.deploy(bundle, cluster))
