"""Find the machines that TVM's RPC tracker lists, and which of them a model can be deployed to now."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rpc_runtime.errors import InputError
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.wire.tracker import ListedServer, TrackerAddress, listed_servers
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.discovery import ASKED_AT_ONCE, AskedMachine, ask, planned_machines
from tvm_split.cluster.launcher import Launcher, WithAccess

NO_WORKER = (
    "a server of TVM's RPC: kernels can be tuned on it, but nothing can be deployed to it, which needs "
    "`tvm-split worker --tracker` instead"
)
TUNING = "kernels are being tuned on it: what it is asked meanwhile would disturb the times, and be slow itself"


@dataclass(frozen=True)
class Tracker(WithAccess, Launcher):
    """The workers that a TVM RPC tracker lists now, under one ``key`` or all, and that answer.

    ``address`` is the HOST:PORT of the tracker.
    """

    name = "tracker"
    argument = "address"

    address: str
    key: str | None = None

    def find(self) -> Cluster:
        tracker = TrackerAddress.parse(self.address)
        found = tracked_machines(tracker, self.key, self.token, self.tls, self.timeout_seconds)
        place = f"the tracker {tracker}" + ("" if self.key is None else f" under the key {self.key!r}")
        advice = f"start `tvm-split worker --tracker {tracker} --key {self.key or 'KEY'}` on each"
        machines, left_out = planned_machines([each.asked for each in found], place, advice)
        return Cluster(machines, left_out=left_out, launcher=self)


@dataclass(frozen=True)
class TrackedMachine:
    """An entry of a tracker: its key, whether kernels can be tuned on it, and its worker's answer."""

    key: str
    tuned: bool
    asked: AskedMachine


def tracked_machines(
    tracker: TrackerAddress,
    key: str | None,
    token: str | None = None,
    tls: TlsFiles | None = None,
    timeout_seconds: float = 5.0,
) -> tuple[TrackedMachine, ...]:
    """Return the servers that a tracker lists under a key (None: any), sorted by name; each worker among them is asked.

    Raises:
        InputError: ``token`` without ``tls``: any process that registers would receive the token.
        WorkerUnavailableError, DeadlineError, ProtocolError: the tracker cannot be reached or does not answer properly.
    """
    if token is not None and tls is None:
        raise InputError(
            "anybody may register with a tracker, so a token is shown to its machines only where TLS proves who they "
            "are: give --tls-ca as well (from Python: tls), or a cluster file, which names the machines"
        )
    listed = [each for each in listed_servers(tracker, timeout_seconds) if key is None or each.key == key]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        found = pool.map(lambda each: _tracked(each, token, tls, timeout_seconds), _newest(listed))
        return tuple(sorted(found, key=lambda each: (each.asked.name, each.asked.endpoint.address)))


def _newest(listed: Sequence[ListedServer]) -> list[ListedServer]:
    """Keep the newest entry of each address: a tracker may still list the one from before a machine's restart."""
    found: dict[str, ListedServer] = {}
    for each in listed:
        known = found.get(each.address)
        if known is None or _since(known) <= _since(each):
            found[each.address] = each
    return list(found.values())


def _since(server: ListedServer) -> float:
    return server.registration.since if server.registration is not None else 0.0


def _tracked(server: ListedServer, token: str | None, tls: TlsFiles | None, timeout_seconds: float) -> TrackedMachine:
    said = server.registration
    tuned = not server.fault and (said is None or said.tunes)
    endpoint = WorkerEndpoint(server.address if said is None else said.name, server.address, token, tls)
    if server.fault:
        reason = f"what it says at the tracker is not to be believed: {server.fault}"
    elif said is None:
        reason = NO_WORKER
    elif said.secure and tls is None:
        reason = "its worker wants TLS: give --tls-ca (from Python: tls)"
    elif said.state == "tuning":
        reason = TUNING
    else:
        return TrackedMachine(server.key, tuned, ask(endpoint, timeout_seconds, said.threads))
    asked = AskedMachine(endpoint, reason=reason, is_fault=reason not in (NO_WORKER, TUNING))
    return TrackedMachine(server.key, tuned, asked)
