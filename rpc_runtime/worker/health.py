"""The standard health service of gRPC (``grpc.health.v1``), by which orchestrators and load balancers check a worker.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md. It reports only whether the worker accepts calls.
Therefore it needs no token.
"""

from __future__ import annotations

import socket
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health import SERVICE_NAME, HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from rpc_runtime.errors import WorkerError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import open_channel
from rpc_runtime.wire.server import CallQuota, bind, new_server
from rpc_runtime.worker.service import CONTROL_SERVICE

PATHS = (f"/{SERVICE_NAME}/Check", f"/{SERVICE_NAME}/Watch")
MAXIMUM_CALLS = 32
MAXIMUM_CONNECTIONS = 256
ANSWER_SECONDS = 10.0
"""Timeout of a worker's check of itself; long enough for a busy host."""


def servicer() -> Any:
    """Return a health servicer that reports SERVING for the worker as a whole and for its control service."""
    health = HealthServicer(experimental_non_blocking=False)
    health.set(CONTROL_SERVICE, pb.HealthCheckResponse.SERVING)
    return health


def quotas() -> dict[str, CallQuota]:
    """Return the quota of each method, by its path."""
    return dict.fromkeys(PATHS, CallQuota("questions about health", MAXIMUM_CALLS, is_open=True))


def health_server(health: Any, listen: str) -> Any:
    """Return a server, not yet started, for health checks only, without TLS, which Kubernetes' probes do not support.

    Raises:
        WorkerError: the server cannot listen on ``listen``.
    """
    server = new_server(quotas(), MAXIMUM_CONNECTIONS)
    add_HealthServicer_to_server(health, server)
    bind(server, listen)
    return server


def require_answer(address: str, *, has_tls: bool) -> None:
    """Check the health of this process's worker at ``address``; with TLS, check only that it accepts connections.

    TLS is not checked because the certificate may be for another name, or signed by another authority.

    Raises:
        WorkerError: the worker does not answer.
    """
    own = Address.parse(address).from_here
    try:
        if has_tls:
            socket.create_connection((own.host, own.port), ANSWER_SECONDS).close()
        else:
            with open_channel(str(own), None) as channel:
                HealthStub(channel).Check(pb.HealthCheckRequest(), timeout=ANSWER_SECONDS)
    except (OSError, grpc.RpcError) as error:
        reason = error if isinstance(error, OSError) else error.details()
        raise WorkerError(
            f"this worker listens on {address}, and does not answer there ({reason}): check the address, and whether "
            "a firewall of this host blocks it"
        ) from None
