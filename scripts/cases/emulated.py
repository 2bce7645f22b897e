"""Helpers of the cases that emulate unequal machines and slow links on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.wire.channels import WorkerEndpoint
from scripts.harness import Side, median_seconds
from scripts.processes import Figures
from scripts.sides import RUNS
from tests.helpers.relay import Relay


def local_workers(names: Sequence[str], until_end: ExitStack) -> LocalWorkers:
    """Start worker processes with one core each and a new cache."""
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


def latency_side(
    name: str, deployment: tvm_split.Deployment, inputs: Sequence[np.ndarray], facts: Mapping[str, Any]
) -> Side:
    return Side(name, partial(_latency, deployment, inputs), facts)


def _latency(deployment: tvm_split.Deployment, inputs: Sequence[np.ndarray]) -> Figures:
    return {"seconds": median_seconds(lambda: deployment.run(*inputs), RUNS)}
