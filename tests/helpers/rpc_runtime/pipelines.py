"""Helpers for deployments on running workers: open them, compare results, and see what they leave behind."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.placement import Placement
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerClient, describe
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec
from rpc_runtime.transports.transport import LinkSetting, LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


def open_on(
    workers: LocalWorkers,
    program: Program,
    maker: ProgramMaker,
    on_event: Callable[[DeploymentEvent], None] = lambda event: None,
    **options: Any,
) -> Session:
    return Session(Opening(program, workers.endpoints, maker.blob_path, **options), on_event)


@contextlib.contextmanager
def placed_on(workers: LocalWorkers, program: Program, maker: ProgramMaker) -> Iterator[Placement]:
    """Open a program without a session, for tests of how a client may end."""
    opening = Opening(program, workers.endpoints, maker.blob_path, PATIENCE_SECONDS)
    dispatcher = Dispatcher(program, PATIENCE_SECONDS, lambda sequence: "a result")
    placement = Placement(opening, dispatcher, lambda opened, failure: None)
    try:
        placement.prepare()
        placement.join()
        yield placement
    finally:
        placement.close(unload=False)
        dispatcher.close()


def over_grpc(program: Program) -> LinkSettings:
    """Links over gRPC, for tests of what only a network link does."""
    ends = {(route.source, route.destination) for route in program.routes}
    return dict.fromkeys(ends, LinkSetting(transport="grpc"))


def same(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def deployments_left(endpoint: WorkerEndpoint) -> tuple[str, ...]:
    """Returns what deployments a worker has once it has none."""
    eventually(lambda: not describe(endpoint, PATIENCE_SECONDS).deployments, "the worker has dropped its deployments")
    return describe(endpoint, PATIENCE_SECONDS).deployments


@contextlib.contextmanager
def watched(endpoint: WorkerEndpoint) -> Iterator[WorkerClient]:
    """Open a deployment without stages while it is watched; yield the caller."""
    connection = WorkerClient(endpoint, secrets.token_hex(16))
    watch = connection.watch()
    next(watch)
    try:
        yield connection
    finally:
        watch.cancel()
        connection.close()


def send_blobs(connection: WorkerClient, blobs: Sequence[BlobSpec], maker: ProgramMaker) -> int:
    """Returns how many bytes were missing on the worker and are sent."""
    return connection.send_blobs(blobs, maker.blob_path, PATIENCE_SECONDS, lambda sent, total: None)
