"""Plans from measurements, kept so that a known network starts without being planned again."""

import hashlib
import logging
from dataclasses import asdict, replace

from rpc_runtime.program.codecs import NONE
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.build_cache import keep, key_of, recall
from tvm_split.compiler.machine_targets import resolve_targets
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.errors import PlanError, ProfileError
from tvm_split.model import Model
from tvm_split.placement.plan import Plan
from tvm_split.placement.profile import ClusterProfile
from tvm_split.placement.strategy import STRATEGIES
from tvm_split.planning.planner import Planner
from tvm_split.profiling.cluster_profile import LINKS
from tvm_split.values import content_of

logger = logging.getLogger(__name__)

UNDECIDING = ("refresh", "database")
"""Fields of a request that decide nothing about a plan; tuned kernels count by their content."""


def kept_plan(planner: Planner) -> Plan | None:
    """Return the plan that `keep_plan` kept, if the machines and all kept measurements are as then; else None.

    One kernel of each machine and the client's links are measured as a check. If the plan uses estimates, it says so.
    If all kept times of kernels hold, ``planner`` plans with these and times no others.
    """
    if planner.request.refresh or not _can_be_kept(planner) or (record := recall(_key(planner))) is None:
        return None
    try:
        plan, made_from, known = Plan.from_dict(record["plan"], "the kept plan"), record["from"], planner.known_profile
        changed = {key for key, _ in made_from.items() - known.kept.items()}
    except (LookupError, TypeError, AttributeError, PlanError, ProfileError) as error:
        logger.debug("the plan of %s that was kept cannot be used: %s", planner.model.name, error)
        return None
    if changed <= {LINKS}:
        planner.profile = known
    if changed or not _fits(plan, known, planner):
        return None
    remarks = tuple(_remarks(plan))
    logger.info("%s: %s", plan.model, " ".join(remarks) or "the plan was kept")
    return replace(plan, request=planner.request, remarks=(*plan.remarks, *remarks))


def keep_plan(planner: Planner, plan: Plan) -> None:
    """Keep a plan that was made from measurements, instead of an earlier one of the same model and request."""
    if _can_be_kept(planner):
        keep(_key(planner), {"from": dict(planner.profile.kept), "plan": plan.to_dict()})


def _can_be_kept(planner: Planner) -> bool:
    """Whether plans are made from measurements, by a strategy of this version: another package's may change."""
    return planner.measures and planner.request.strategy in STRATEGIES.built_in


def _key(planner: Planner) -> str:
    """Return the key of all that decides how a plan is made, besides measurements and what workers report."""
    model, cluster, request = planner.model, planner.workers, planner.request
    targets = resolve_targets(cluster, cluster.machine_names, planner.described)
    tuned = open_database(request.database)
    return key_of(
        targets.values(),
        planned=[model.name, model.digest],
        request={name: value for name, value in content_of(request).items() if name not in UNDECIDING},
        launcher=cluster.launcher.name,
        machines=[[one.name, one.threads, one.memory_bytes, one.address] for one in cluster.machines],
        built_for=targets,
        links=[asdict(link) for link in cluster.links],
        shared_cores=[asdict(shared) for shared in cluster.shared_cores],
        tried_on=_tried_on(model, cluster),
        tuned=None if tuned is None else tuned.digest,
    )


def _tried_on(model: Model, cluster: Workers) -> list[str]:
    """Return the digests of the example inputs, if codecs are tried on them; a codec's error is that for these."""
    if all(link.codec == NONE for link in cluster.links):
        return []
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in model.example_inputs or ()]


def _fits(plan: Plan, known: ClusterProfile, planner: Planner) -> bool:
    """Whether a plan fits the memory that is free now; the user's limits are those that it was made for."""
    free_bytes = {machine.machine: machine.memory_free_bytes for machine in known.machines}
    return plan.prediction is not None and all(
        planner.workers.machine(one.machine).memory_bytes is not None or one.memory_bytes <= free_bytes[one.machine]
        for one in plan.prediction.machines
    )


def _remarks(plan: Plan) -> list[str]:
    """Return a sentence about the estimates in a plan that is used again; none if all of it was measured."""
    machines = plan.prediction.machines if plan.prediction else ()
    shares = [f"{one.estimated_share:.1%} on {one.machine}" for one in machines if one.estimated_share]
    text = f"the plan was kept, and its computing is partly estimated: {', '.join(shares)}"
    return [f"{text}; `tvm-split plan`, or --refresh, times more of it"] if shares else []
