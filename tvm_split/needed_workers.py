"""Ask the workers that a plan needs, before a model is imported for it, which takes seconds."""

from __future__ import annotations

from rpc_runtime.client.worker_client import describe, on_every_machine, raise_errors
from rpc_runtime.errors import TvmSplitError
from tvm_split.cluster.cluster import Cluster
from tvm_split.planner.request import PlanRequest


def require_needed_workers(cluster: Cluster, request: PlanRequest, *, deploys: bool = False) -> None:
    """Raise the errors of workers without which there can be no plan or, if the plan ``deploys``, no deployment.

    Measuring needs all workers, and a machine without a target needs its own. A deployment of an automatic split needs
    at least one. Workers that the cluster starts are not asked, since they do not run yet.

    Raises:
        WorkerUnavailableError, WorkerError, ProtocolError: a needed worker does not answer, or answers wrongly.
    """
    if any(machine.endpoint is None for machine in cluster.machines):
        return
    by_hand = set(request.split) if isinstance(request.split, dict) else set()
    by_hand |= {machine for shard in request.shards for machine in shard.shares}
    machines = [machine for machine in cluster.machines if not by_hand or machine.name in by_hand]
    searches = not request.is_by_hand and (len(cluster.machines) > 1 or request.is_demanding)
    if (searches or request.predict) and not (request.estimate or request.profile):
        needed = set(cluster.machine_names)
    else:
        needed = {machine.name for machine in machines if machine.target is None or (deploys and by_hand)}
    errors: dict[str, TvmSplitError] = {}
    names = needed | ({machine.name for machine in machines} if deploys else set())
    with cluster.start() as workers:
        endpoints = workers.endpoints() if names else {}

    def ask(name: str) -> None:
        try:
            describe(endpoints[name])
        except TvmSplitError as error:
            errors[name] = error

    on_every_machine(sorted(names), ask)
    if errors.keys() & needed or (names and errors.keys() == names):
        raise_errors([errors[name] for name in cluster.machine_names if name in errors])
