"""Launchers for workers that run already: in a cluster file, at addresses, listed by TVM's RPC tracker, or as pods.

Pods are found with ``kubectl``, and not with a client library, since it has the user's contexts, logins and proxies.
"""

import json
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rpc_runtime.client.asking import on_every_machine
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import DeadlineError, InputError, ProtocolError, WorkerUnavailableError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.text import cleaned
from rpc_runtime.wire.tracker import ListedServer, listed_servers
from tvm_split.cluster.cluster import Cluster, cluster_of
from tvm_split.cluster.cluster_file import read_cluster_file
from tvm_split.cluster.launcher import AskedMachine, Launcher, Running, Started, WithAccess, ask_worker, endpoints_of
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError


@dataclass(frozen=True)
class ClusterFile(Launcher):
    """The machines and links of a YAML file; see `tvm_split.cluster.cluster_file`."""

    name = "file"
    argument = "path"

    path: Path = Path("cluster.yaml")

    def find(self) -> Cluster:
        return Cluster(*read_cluster_file(self.path), launcher=self)


@dataclass(frozen=True)
class At(WithAccess, Launcher):
    """Workers at addresses, ``HOST:PORT`` separated by commas; each worker reports its machine's name and threads.

    A cluster that code makes from `Machine` objects has this launcher, without addresses.
    """

    name = "at"
    argument = "addresses"

    addresses: str = ""

    def find(self) -> Cluster:
        return Cluster(tuple(on_every_machine(self._endpoints(), self._machine).values()), launcher=self)

    def ask(self, timeout_seconds: float = 5.0) -> Sequence[AskedMachine]:
        """Ask the workers at the addresses; a worker that does not answer has its address as its name."""
        answers = on_every_machine(self._endpoints(), lambda endpoint: ask_worker(endpoint, timeout_seconds))
        return [
            answer
            if answer.worker is None
            else replace(answer, endpoint=replace(endpoint, machine=answer.worker.machine))
            for endpoint, answer in answers.items()
        ]

    def _endpoints(self) -> list[WorkerEndpoint]:
        addresses = [text.strip() for text in self.addresses.split(",") if text.strip()]
        if not addresses:
            raise ClusterError("at: needs at least one HOST:PORT, several are separated by commas")
        return [WorkerEndpoint(address, address, self.token, self.tls) for address in addresses]

    def _machine(self, endpoint: WorkerEndpoint) -> Machine:
        worker = describe(endpoint, self.timeout_seconds)
        return Machine(worker.machine, worker.threads, endpoint=replace(endpoint, machine=worker.machine))


LISTENS_SECONDS = 1.0


class ListingLauncher(WithAccess, Launcher):
    """The base class of launchers that read the addresses of running workers from a service."""

    @abstractmethod
    def list_machines(self, timeout_seconds: float) -> Sequence[AskedMachine]:
        """Return the machines that the service lists, each with its listed threads or the reason why it cannot be used.

        Raises:
            WorkerUnavailableError, DeadlineError, ProtocolError: the service does not answer, or answers wrongly.
        """

    def cluster(self, place: str, advice: str) -> Cluster:
        """Return the cluster of the usable machines, sorted by name; its ``left_out`` has the reasons for the others.

        The message of an error begins with ``place``, the service; ``advice`` says how to add a machine.

        Raises:
            ClusterError: there is no machine, or two of them have the same name.
        """
        answers = self.ask(self.timeout_seconds)
        machines = sorted(
            (machine for answer in answers if (machine := answer.machine) is not None),
            key=lambda machine: (machine.name, machine.address or ""),
        )
        left_out = {f"{answer.name} at {answer.endpoint.address}": answer.reason for answer in answers if answer.reason}
        if not machines:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
            raise ClusterError(f"{place} has no machine that can be deployed to; {advice}{reasons}")
        for first, second in pairwise(machines):
            if first.name == second.name:
                raise ClusterError(
                    f"{place} has two machines named {first.name!r}, at {first.address} and {second.address}: "
                    "start their workers with --name, each with one of its own"
                )
        return Cluster(tuple(machines), left_out=left_out, launcher=self)

    def start(self, cluster: Cluster) -> Started:
        return ListedWorkers(self, cluster)

    def ask(self, timeout_seconds: float = 5.0) -> Sequence[AskedMachine]:
        listed = self.list_machines(timeout_seconds)
        answers = on_every_machine(range(len(listed)), lambda index: _ask_listed(listed[index], timeout_seconds))
        return sorted(answers.values(), key=lambda answer: (answer.name, answer.endpoint.address))


def _ask_listed(listed: AskedMachine, timeout_seconds: float) -> AskedMachine:
    """Return a listed machine with its worker's answer; a fault if its name or threads are not those listed."""
    name, threads = listed.name, listed.threads
    if listed.reason:
        return listed
    if name == CLIENT:
        reason = f"its worker is named {CLIENT!r}, which is reserved for the client: give it another --name"
        return replace(listed, reason=reason, is_fault=True)
    answer = ask_worker(listed.endpoint, timeout_seconds)
    worker = answer.worker
    if worker is None or (worker.machine == name and threads in (None, worker.threads)):
        return answer
    reason = (
        f"it should be {name!r}{f' with {threads} threads' if threads else ''}, and the worker that answers is "
        f"{worker.machine!r} with {worker.threads}"
    )
    return replace(answer, reason=reason, is_fault=True)


class ListedWorkers(Running):
    """Workers that a service lists. If one does not accept connections, `endpoints` reads all addresses again."""

    def __init__(self, launcher: Launcher, cluster: Cluster) -> None:
        super().__init__(endpoints_of(cluster))
        self._launcher = launcher

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        if not all(on_every_machine(self.by_machine.values(), _listens).values()):
            current = endpoints_of(cluster_of(self._launcher))
            self.by_machine = {name: current.get(name, endpoint) for name, endpoint in self.by_machine.items()}
        return self.by_machine


def _listens(endpoint: WorkerEndpoint) -> bool:
    try:
        Address.parse(endpoint.address).connect(LISTENS_SECONDS).close()
    except OSError:
        return False
    return True


NO_WORKER = (
    "a server of TVM's RPC: kernels can be tuned on it, but nothing can be deployed to it, which needs "
    "`tvm-split worker --tracker` instead"
)
TUNING = "kernels are being tuned on it; other requests would disturb the times"


@dataclass(frozen=True)
class Tracker(ListingLauncher):
    """The workers that the TVM RPC tracker at ``address`` (HOST:PORT) lists now."""

    name = "tracker"
    argument = "address"

    address: str
    key: str | None = None

    def find(self) -> Cluster:
        place = f"the tracker {self.address}" + ("" if self.key is None else f" under the key {self.key!r}")
        advice = f"start `tvm-split worker --tracker {self.address} --key {self.key or 'KEY'}` on each"
        return self.cluster(place, advice)

    def list_machines(self, timeout_seconds: float) -> Sequence[AskedMachine]:
        """Return the servers that the tracker lists under the key.

        Raises:
            InputError: a token without TLS: any process that registers would receive the token.
            WorkerUnavailableError, DeadlineError, ProtocolError: the tracker cannot be reached or does not answer
                properly.
        """
        if self.token is not None and self.tls is None:
            raise InputError(
                "a tracker does not authenticate machines, so a token needs TLS: give tls_ca (from Python: tls), or "
                "use a cluster file, which names the machines"
            )
        servers = listed_servers(Address.callable(self.address), timeout_seconds)
        listed = [server for server in servers if self.key in (None, server.key)]
        return [self._listed(server) for server in _newest(listed)]

    def _listed(self, server: ListedServer) -> AskedMachine:
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
            return AskedMachine(endpoint, threads=registration.threads)
        return AskedMachine(endpoint, reason=reason, is_fault=True)


def _newest(listed: Sequence[ListedServer]) -> list[ListedServer]:
    """Return the newest entry of each address, since a tracker may still list the one before a machine's restart."""
    by_age = sorted(listed, key=lambda server: server.registration.since if server.registration else 0.0)
    return list({server.address: server for server in by_age}.values())


PORT_NAME = "worker"
"""The name of the container's port, as in ``deploy/kubernetes``."""
KUBECTL_SECONDS = 30.0


@dataclass(frozen=True)
class Kubernetes(ListingLauncher):
    """The workers of the pods with these labels that are ready now, as listed by ``kubectl``.

    Machines have the names of their pods. The default namespace is that of kubectl's context. The pods are called
    directly, so this works only inside the Kubernetes cluster.
    """

    name = "kubernetes"
    argument = "selector"

    selector: str = "app.kubernetes.io/name=tvm-split"
    namespace: str | None = None

    def find(self) -> Cluster:
        advice = "`kubectl get pods` says why; deploy/kubernetes is one way to start some"
        return self.cluster(f"Kubernetes, with the labels {self.selector},", advice)

    def list_machines(self, timeout_seconds: float) -> Sequence[AskedMachine]:
        """Return the pods with the labels.

        Raises:
            WorkerUnavailableError: kubectl is missing or fails.
            DeadlineError, ProtocolError: kubectl does not answer, or its answer is no list of pods.
        """
        return [self._listed(pod) for pod in _pods(self.selector, self.namespace)]

    def _listed(self, pod: Mapping[str, Any]) -> AskedMachine:
        try:
            name, phase = cleaned(str(pod["metadata"]["name"])), cleaned(str(pod["status"]["phase"]))
            conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", ())}
            port = _port(pod["spec"]["containers"])
            host = cleaned(_host(pod))
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"kubectl returned an invalid pod: it lacks {error}") from error
        endpoint = WorkerEndpoint(name, str(Address(host, port or 0)), self.token, self.tls)
        if port is None:
            reason = f"its pod has no container with a port named {PORT_NAME!r}"
            return AskedMachine(endpoint, reason=reason, is_fault=True)
        if "deletionTimestamp" in pod["metadata"]:
            return AskedMachine(endpoint, reason="its pod is ending")
        if phase != "Running" or conditions.get("Ready") != "True":
            return AskedMachine(endpoint, reason=f"its pod is not ready (phase {phase})")
        return AskedMachine(endpoint)


def _pods(selector: str, namespace: str | None) -> list[Mapping[str, Any]]:
    command = ["kubectl", "get", "pods", f"--selector={selector}", "--output=json"]
    command += [f"--request-timeout={KUBECTL_SECONDS - 5:g}s", *([f"--namespace={namespace}"] if namespace else [])]
    try:
        answer = subprocess.run(  # noqa: S603 (no shell; each option is one word)
            command, capture_output=True, text=True, timeout=KUBECTL_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise WorkerUnavailableError("pods are asked for with kubectl, which is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"kubectl did not answer within {KUBECTL_SECONDS:g} s") from error
    if answer.returncode:
        message = cleaned(answer.stderr.strip() or "no message")
        raise WorkerUnavailableError(f"`{' '.join(command)}` failed: {message}")
    try:
        items = json.loads(answer.stdout)["items"]
        return [dict(item) for item in items]
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"`{' '.join(command)}` answers without a list of pods") from error


def _port(containers: Sequence[Mapping[str, Any]]) -> int | None:
    ports = (port for container in containers for port in container.get("ports", ()))
    return next((int(port["containerPort"]) for port in ports if port.get("name") == PORT_NAME), None)


def _host(pod: Mapping[str, Any]) -> str:
    """Return the pod's DNS name in a headless service, which certificates can name; otherwise its IP address."""
    spec, metadata = pod["spec"], pod["metadata"]
    if spec.get("hostname") and spec.get("subdomain"):
        return f"{spec['hostname']}.{spec['subdomain']}.{metadata['namespace']}.svc"
    return str(pod["status"].get("podIP", "nowhere"))
