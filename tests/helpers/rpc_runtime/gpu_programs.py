"""Programs for the workers of `gpu_worker`, whose stages are defined by the tests."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np

from rpc_runtime.client.session import Session
from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import LinkSetting, LinkSettings
from tests.helpers.rpc_runtime.cuda_stand_in import compiled
from tests.helpers.rpc_runtime.gpu_worker import GpuWorkers
from tests.helpers.rpc_runtime.pipelines import deployments_left
from tests.helpers.waiting import eventually

LIBRARY = b"no library: the stages are the tests' own"
BLOB = BlobSpec(hashlib.sha256(LIBRARY).hexdigest(), len(LIBRARY))


def compiled_with_blob(folder: Path) -> Path:
    """Return the stand-in for CUDA's runtime, and the blob that all stages share."""
    (folder / "blob").write_bytes(LIBRARY)
    return compiled(folder)


def all_links(machines: str, transport: str) -> LinkSettings:
    return {ends: LinkSetting(transport=transport) for ends in itertools.permutations(machines, 2)}


def opened(
    workers: GpuWorkers, program: Program, library: Path, links: LinkSettings, *, timeout_seconds: float = 30
) -> Session:
    blob = library.with_name("blob")
    seconds = timeout_seconds
    return Session(program, workers.endpoints, lambda sha256: blob, timeout_seconds=seconds, links=links)


def batches(program: Program, count: int) -> list[list[np.ndarray]]:
    return [[np.array([n, 7 * n + i]) for i in range(len(program.inputs))] for n in range(count)]


def chain(machines: str = "ABA") -> Program:
    """Return a chain of stages. By default from A to B and back, so that both workers send and receive."""
    tensors = [TensorSpec(f"t{place}", (2,), "int64") for place in range(len(machines) + 1)]
    stages = tuple(
        StageSpec(place, f"s{place}", machine, (), "cpu", BLOB, (), (tensors[place],), (tensors[place + 1],))
        for place, machine in enumerate(machines)
    )
    return Program((tensors[0],), (tensors[-1],), stages)


def carried(pipeline: Session) -> set[str]:
    """Return the transports of the links between workers."""
    return {link.transport for link in pipeline.links() if CLIENT not in (link.source, link.destination)}


def is_empty(workers: GpuWorkers, name: str) -> bool:
    """Return whether a worker has freed everything of a deployment within the time limit."""
    eventually(lambda: workers.areas(name) == 0, "no memory of the GPU is left")
    return not deployments_left(workers.endpoints[name])
