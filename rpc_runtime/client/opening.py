"""What a session runs: a program, where its workers are, and how it is opened there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.program.program import Program
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, USUAL_WATCH, LinkTimeouts, WatchTimeouts
from rpc_runtime.transports.transport import LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint

Endpoints = Mapping[str, WorkerEndpoint]
Descriptions = Mapping[str, WorkerDescription]
TransferProgress = Callable[[str, int, int], None]
"""Called while blobs are sent, with (machine, bytes sent, total bytes)."""


class Recovery(Protocol):
    """What knows the machines that could compute stages."""

    def endpoints(self) -> Endpoints:
        """Return the addresses of all machines that may get stages."""

    def refresh(self) -> None:
        """Find the machines again, and start those that ended, as far as the cluster can; may take long."""

    def place(self, lost: Collection[str], workers: Descriptions) -> Program:
        """Return the program on machines of ``workers`` that are not ``lost``.

        Raises:
            WorkerUnavailableError: a stage fits on none of them.
        """


def accept_all(program: Program, endpoints: Endpoints, workers: Descriptions) -> None:
    """Raise no error: every worker may run its stages."""


@dataclass(frozen=True)
class Opening:
    """A program, the workers of its machines and perhaps of others, and how it is opened.

    Args:
        blob_path: returns the file of a blob by its SHA-256.
        timeout_seconds: how long a step of opening, and later a result, may take without progress.
        on_transfer: called while blobs are sent, from one thread at a time.
        links: settings of links that differ from the default.
        in_flight: limit of micro-batches fed whose results are not taken; default: only the queues limit them.
        timeouts: after how long a silent link counts as dead.
        watch: after how long a silent worker counts as dead.
        check: called with the description of each worker before anything is sent; what it raises ends the opening.
        model: the name by which workers list the deployment.
        about: returns the JSON for `Bystander.about` of a program as it is placed, of at most `MAXIMUM_ABOUT_BYTES`.
        recovery: where stages go if a machine fails or drains; None: the failure is raised.
        holds: programs that are loaded too, with this recovery, and not connected: their machines may get these stages.
    """

    program: Program
    endpoints: Endpoints
    blob_path: Callable[[str], Path]
    timeout_seconds: float = 60.0
    on_transfer: TransferProgress | None = None
    links: LinkSettings = field(default_factory=dict)
    in_flight: int | None = None
    timeouts: LinkTimeouts = USUAL_TIMEOUTS
    watch: WatchTimeouts = USUAL_WATCH
    check: Callable[[Program, Endpoints, Descriptions], None] = accept_all
    model: str = ""
    about: Callable[[Program], bytes] = lambda program: b""
    recovery: Recovery | None = None
    holds: Sequence[Program] = ()
