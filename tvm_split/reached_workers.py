"""Ask a cluster's workers whether they answer before a model or bundle is read, which takes seconds."""

from collections.abc import Collection

from rpc_runtime.client.asking import answers_of, raise_errors
from rpc_runtime.client.worker_client import WorkerDescription, describe, describe_all
from rpc_runtime.errors import WorkerUnavailableError
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.placement.request import PlanRequest

DESCRIBE_TIMEOUT_SECONDS = 3.0
"""Timeout for describing a worker."""


def reached_workers(cluster: Cluster, request: PlanRequest, *, deploys: bool = False) -> dict[str, WorkerDescription]:
    """Return the descriptions of the workers that answer, by machine.

    Return an empty dict if this process starts the workers. Workers that a running session has started are asked.

    Raises:
        WorkerUnavailableError: a worker that the plan needs is unreachable, or, with ``deploys``, every worker that the
            plan may use.
        WorkerError, ProtocolError: a worker refuses, or has another version.
    """
    starts = any(machine.endpoint is None for machine in cluster.machines) and not isinstance(cluster, Workers)
    if cluster.launcher.on_this_host or starts:
        return {}
    with cluster.start() as workers:
        endpoints = workers.endpoints()

    def ask(name: str) -> WorkerDescription:
        return describe(endpoints[name], DESCRIBE_TIMEOUT_SECONDS)

    answers, errors = answers_of(endpoints, ask, WorkerUnavailableError)
    used = _used(cluster, request)
    if errors.keys() & _needed(cluster, request, used, deploys=deploys) or (deploys and errors.keys() >= used):
        raise_errors(list(errors.values()))
    return answers


def require_answers(cluster: Cluster, machines: Collection[str]) -> None:
    """Raise as `describe_all` unless the workers of these machines answer; those that do not run yet are left out."""
    endpoints = {machine.name: machine.endpoint for machine in cluster.machines if machine.name in machines}
    running = {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}
    describe_all(running, DESCRIBE_TIMEOUT_SECONDS)


def _used(cluster: Cluster, request: PlanRequest) -> set[str]:
    """Return the machines that a plan may use: those named in a split by hand, otherwise all."""
    named = set() if isinstance(request.split, str) else set(request.split)
    named.update(machine for shard in request.shards for machine in shard.shares)
    return named & set(cluster.machine_names) or set(cluster.machine_names)


def _needed(cluster: Cluster, request: PlanRequest, used: set[str], *, deploys: bool) -> set[str]:
    """Return the machines whose workers a plan needs: all to measure, otherwise those that have no described target."""
    searches = not request.is_by_hand and (len(cluster.machines) > 1 or request.is_demanding)
    if (searches or request.predict) and not (request.estimate or request.profile):
        return set(cluster.machine_names)
    if request.is_by_hand and deploys:
        return used
    return {name for name in used if cluster.machine(name).target is None}
