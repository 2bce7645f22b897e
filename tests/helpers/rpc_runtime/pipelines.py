"""Deployments on running workers: how tests begin them, compare their results, and see what they leave behind."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.waiting import wait_for
from tvm_split.rpc_runtime.client.client import WorkerConnection, WorkerDescription, describe
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.client.pipeline import Pipeline
from tvm_split.rpc_runtime.program.link_setting import LinkSetting, LinkSettings, Transport
from tvm_split.rpc_runtime.program.measurements import StageStatistics
from tvm_split.rpc_runtime.program.program import Program
from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint

PROMPT_SECONDS = 8.0
"""Less than a silent call may last, and more than a busy machine takes."""


def open_on(workers: LocalWorkers, program: Program, maker: ProgramMaker, **options: Any) -> Pipeline:
    return Pipeline.open(program, workers.endpoints, maker.blob_path, **options)


def over_grpc(program: Program) -> LinkSettings:
    """For tests of what only a network has."""
    ends = {(route.source, route.destination) for route in program.routes}
    return dict.fromkeys(ends, LinkSetting(transport=Transport.GRPC))


def statistics_of_all_sent(pipeline: Pipeline) -> tuple[StageStatistics, ...]:
    """What was sent counts when the next is asked for, which may be after the client has all results."""
    wait_for(lambda: all(each.bytes_sent == each.bytes_received for each in pipeline.statistics()))
    return pipeline.statistics()


def same(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def deployments_left(endpoint: WorkerEndpoint) -> tuple[str, ...]:
    """What a worker still holds when it has had time to notice that nobody wants it."""
    wait_for(lambda: not describe(endpoint, 10).deployments)
    return describe(endpoint, 10).deployments


@contextlib.contextmanager
def watched(endpoint: WorkerEndpoint) -> Iterator[tuple[WorkerConnection, str]]:
    """A deployment with nothing in it, as long as it is watched: who began it, and its name."""
    connection, deployment = WorkerConnection(endpoint), secrets.token_hex(16)
    watch = connection.watch(deployment)
    next(watch)
    try:
        yield connection, deployment
    finally:
        watch.cancel()
        connection.close()


def prompt(endpoint: WorkerEndpoint) -> WorkerDescription:
    """What a worker says of itself, and soon."""
    start = time.monotonic()
    found = describe(endpoint, 20)
    assert time.monotonic() - start < PROMPT_SECONDS
    return found
