"""How a bundle is opened on the workers of a cluster."""

from functools import partial

from rpc_runtime.client.opening import Descriptions, Endpoints, Opening, TransferProgress
from rpc_runtime.client.worker_client import answering, describe_all, not_drained
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.bundle import Bundle
from tvm_split.deployment.checks import check_codecs, check_workers
from tvm_split.deployment.options import DeployOptions
from tvm_split.deployment.recovery import BundleRecovery, watch_timeouts
from tvm_split.observing.about import about_of, text_of


def _free(endpoints: Endpoints) -> Descriptions:
    return not_drained(answering(endpoints))


def opening_of(
    bundle: Bundle,
    workers: Workers,
    options: DeployOptions,
    on_transfer: TransferProgress | None,
    is_move: bool = False,
) -> Opening:
    """Return how a bundle is opened on workers; the session's workers start.

    After a move, machines on standby that do not answer or are drained hold nothing; before the first one, that is an
    error.
    """
    check_codecs(bundle.program, workers)
    endpoints = workers.endpoints()
    recovery = BundleRecovery(bundle, workers, endpoints, options.spares) if options.on_failure == "recover" else None
    return Opening(
        bundle.program,
        endpoints,
        bundle.blob_path,
        timeout_seconds=options.timeout_seconds,
        on_transfer=on_transfer,
        links=workers.link_settings,
        in_flight=bundle.plan.in_flight if options.in_flight is None else options.in_flight,
        watch=watch_timeouts(bundle.plan.prediction, workers, options.failure_timeout_seconds),
        check=partial(check_workers, bundle, workers),
        model=bundle.model,
        about=lambda program: text_of(about_of(bundle, program)),
        recovery=recovery,
        holds=() if recovery is None else recovery.holds(_free if is_move else describe_all),
    )
