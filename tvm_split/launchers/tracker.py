"""Find the machines that TVM's RPC tracker lists, and which of them a model can be deployed to now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpc_runtime.client.worker_client import on_every_machine
from rpc_runtime.errors import InputError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.tracker import ListedServer, listed_servers
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import AskedMachine, Launcher, Listed, Started, WithAccess, ask, planned_machines

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
        place = f"the tracker {self.address}" + ("" if self.key is None else f" under the key {self.key!r}")
        advice = f"start `tvm-split worker --tracker {self.address} --key {self.key or 'KEY'}` on each"
        machines, left_out = planned_machines(self.ask(self.timeout_seconds), place, advice)
        return Cluster(machines, left_out=left_out, launcher=self)

    def start(self, cluster: Cluster) -> Started:
        return Listed(self, cluster)

    def ask(self, timeout_seconds: float = 5.0) -> Sequence[AskedMachine]:
        """Ask the workers among the servers that the tracker lists.

        Raises:
            InputError: a token without TLS: any process that registers would receive the token.
            WorkerUnavailableError, DeadlineError, ProtocolError: the tracker cannot be reached or does not answer
                properly.
        """
        if self.token is not None and self.tls is None:
            raise InputError(
                "anybody may register with a tracker, so a token is shown to its machines only where TLS proves who "
                "they are: give tls_ca as well (from Python: tls), or a cluster file, which names the machines"
            )
        servers = listed_servers(Address.callable(self.address), timeout_seconds)
        listed = [server for server in servers if self.key in (None, server.key)]
        machines = on_every_machine(_newest(listed), lambda server: self._asked(server, timeout_seconds))
        return sorted(machines.values(), key=lambda machine: (machine.name, machine.endpoint.address))

    def _asked(self, server: ListedServer, timeout_seconds: float) -> AskedMachine:
        registration = server.registration
        name = str(server.address) if registration is None else registration.name
        endpoint = WorkerEndpoint(name, str(server.address), self.token, self.tls)
        if server.is_invalid:
            reason = "its registration at the tracker is invalid in this version"
        elif registration is None:
            return AskedMachine(endpoint, reason=NO_WORKER)
        elif registration.state == "tuning":
            return AskedMachine(endpoint, reason=TUNING)
        elif registration.secure and self.tls is None:
            reason = "its worker wants TLS: give tls_ca (from Python: tls)"
        else:
            return ask(endpoint, timeout_seconds, registration.threads)
        return AskedMachine(endpoint, reason=reason, is_fault=True)


def _newest(listed: Sequence[ListedServer]) -> list[ListedServer]:
    """Keep the newest entry of each address: a tracker may still list the one from before a machine's restart."""
    by_age = sorted(listed, key=lambda server: server.registration.since if server.registration else 0.0)
    return list({server.address: server for server in by_age}.values())
