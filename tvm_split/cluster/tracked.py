"""The machines that TVM's RPC tracker lists, and which of them a model can be deployed to at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError
from tvm_split.rpc_runtime.client.client import WorkerDescription, describe
from tvm_split.rpc_runtime.errors import InputError, TvmSplitError
from tvm_split.rpc_runtime.program.program import CLIENT
from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.rpc_runtime.wire.security import TlsFiles
from tvm_split.rpc_runtime.wire.tracker import ListedServer, TrackerAddress, listed_servers

ASKED_AT_ONCE = 32
NO_WORKER = (
    "a server of TVM's RPC: kernels can be tuned on it, but nothing can be deployed to it, which needs "
    "`tvm-split worker --tracker` instead"
)
TUNING = "kernels are being tuned on it: what it is asked meanwhile would disturb the times, and be slow itself"


@dataclass(frozen=True)
class TrackedMachine:
    """An entry of a tracker, with what its worker says of itself, or a ``reason`` why nothing can be deployed there."""

    key: str
    name: str
    endpoint: WorkerEndpoint
    tuned: bool
    worker: WorkerDescription | None
    reason: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the reason is something that should not be."""
        return self.reason not in ("", NO_WORKER, TUNING)

    @property
    def machine(self) -> Machine | None:
        """The machine to plan on; None where there is a ``reason``."""
        if self.reason or self.worker is None:
            return None
        return Machine(self.name, self.worker.threads, endpoint=self.endpoint)


def tracked_machines(
    tracker: TrackerAddress,
    key: str | None,
    token: str | None = None,
    tls: TlsFiles | None = None,
    timeout_seconds: float = 5.0,
) -> tuple[TrackedMachine, ...]:
    """All that a tracker lists now under a key (None: any), by name; every worker among them is asked what it is.

    Raises:
        InputError: ``token`` without ``tls``: it would be told to whoever registers.
        WorkerUnavailableError, DeadlineError, ProtocolError: of the tracker.
    """
    if token is not None and tls is None:
        raise InputError(
            "anybody may register with a tracker, so a token is shown to its machines only where TLS proves who they "
            "are: give --tls-ca as well (from Python: tls), or a cluster file, which names the machines"
        )
    listed = [each for each in listed_servers(tracker, timeout_seconds) if key is None or each.key == key]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        found = pool.map(lambda each: _tracked(each, token, tls, timeout_seconds), _newest(listed))
        return tuple(sorted(found, key=lambda each: (each.name, each.endpoint.address)))


def planned_machines(
    tracker: TrackerAddress, key: str | None, found: Sequence[TrackedMachine]
) -> tuple[tuple[Machine, ...], dict[str, str]]:
    """The machines to plan on, and why the others, by name or address, are left out.

    Raises:
        ClusterError: there is none, or two of them have one name.
    """
    machines = tuple(machine for each in found if (machine := each.machine) is not None)
    left_out = {f"{each.name} at {each.endpoint.address}": each.reason for each in found if each.reason}
    if not machines:
        which = "no machine" if key is None else f"no machine of key {key!r}"
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise ClusterError(
            f"the tracker {tracker} lists {which} that can be deployed to; start `tvm-split worker --tracker {tracker} "
            f"--key {key or 'KEY'}` on each{reasons}"
        )
    for first, second in pairwise(machines):
        if first.name == second.name:
            raise ClusterError(
                f"the tracker {tracker} lists two machines named {first.name!r}, at {first.address} and "
                f"{second.address}: start their workers with --name, each with one of its own"
            )
    return machines, left_out


def _newest(listed: Sequence[ListedServer]) -> list[ListedServer]:
    """Each address once: of a machine that was switched off and came back, the tracker may list what was before."""
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
    endpoint = WorkerEndpoint(server.address if said is None else said.name, server.address, token, tls)

    def result(reason: str, worker: WorkerDescription | None = None) -> TrackedMachine:
        tuned = not server.fault and (said is None or said.tunes)
        return TrackedMachine(server.key, endpoint.machine, endpoint, tuned, worker, reason)

    if server.fault:
        return result(f"what it says at the tracker is not to be believed: {server.fault}")
    if said is None:
        return result(NO_WORKER)
    if said.name == CLIENT:
        return result(f"its worker is named {CLIENT!r}, as the process that deploys is: give it another --name")
    if said.secure and tls is None:
        return result("its worker wants TLS: give --tls-ca (from Python: tls)")
    if said.state == "tuning":
        return result(TUNING)
    try:
        worker = describe(endpoint, timeout_seconds)
    except TvmSplitError as error:
        return result(f"its worker does not answer: {error}")
    if (worker.machine, worker.threads) != (said.name, said.threads):
        return result(
            f"it is listed as {said.name!r} with {said.threads} threads, and the worker that answers is "
            f"{worker.machine!r} with {worker.threads}",
            worker,
        )
    return result("", worker)
