"""Launchers for workers that run already: in a cluster file, at addresses, listed by TVM's RPC tracker, or as pods.

Pods are found with ``kubectl``, and not with a client library, since it has the user's contexts, logins and proxies.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpc_runtime.client.worker_client import describe, on_every_machine
from rpc_runtime.errors import DeadlineError, InputError, ProtocolError, WorkerUnavailableError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.framing import cleaned
from rpc_runtime.wire.tracker import ListedServer, listed_servers
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.cluster_file import read_cluster_file
from tvm_split.cluster.launcher import AskedMachine, Launcher, Listed, Started, WithAccess, ask, planned_machines
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
        addresses = [text.strip() for text in self.addresses.split(",") if text.strip()]
        if not addresses:
            raise ClusterError("at: needs at least one HOST:PORT, several are separated by commas")
        return Cluster(tuple(on_every_machine(addresses, self._machine).values()), launcher=self)

    def _machine(self, address: str) -> Machine:
        worker = describe(WorkerEndpoint(address, address, self.token, self.tls), self.timeout_seconds)
        endpoint = WorkerEndpoint(worker.machine, address, self.token, self.tls)
        return Machine(worker.machine, worker.threads, endpoint=endpoint)


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


PORT_NAME = "worker"
"""The name of the container's port, as in ``deploy/kubernetes``."""
KUBECTL_SECONDS = 30.0


@dataclass(frozen=True)
class Kubernetes(WithAccess, Launcher):
    """The workers of the pods with these labels that are ready now, as listed by ``kubectl``.

    Machines have the names of their pods. The pods are called directly, so this works only inside the Kubernetes
    cluster. The default namespace is that of kubectl's context.
    """

    name = "kubernetes"
    argument = "selector"

    selector: str = "app.kubernetes.io/name=tvm-split"
    namespace: str | None = None

    def find(self) -> Cluster:
        advice = "`kubectl get pods` says why; deploy/kubernetes is one way to start some"
        place = f"Kubernetes, with the labels {self.selector},"
        machines, left_out = planned_machines(self.ask(self.timeout_seconds), place, advice)
        return Cluster(machines, left_out=left_out, launcher=self)

    def start(self, cluster: Cluster) -> Started:
        return Listed(self, cluster)

    def ask(self, timeout_seconds: float = 5.0) -> Sequence[AskedMachine]:
        """Ask the worker of every ready pod with the labels.

        Raises:
            WorkerUnavailableError: kubectl is missing or fails.
            DeadlineError, ProtocolError: kubectl does not answer, or its answer is no list of pods.
        """
        pods = _pods(self.selector, self.namespace)
        machines = on_every_machine(range(len(pods)), lambda index: self._asked(pods[index], timeout_seconds))
        return sorted(machines.values(), key=lambda machine: machine.name)

    def _asked(self, pod: Mapping[str, Any], timeout_seconds: float) -> AskedMachine:
        try:
            name, phase = cleaned(str(pod["metadata"]["name"])), cleaned(str(pod["status"]["phase"]))
            conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", ())}
            port = _port(pod["spec"]["containers"])
            host = cleaned(_host(pod))
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"kubectl returned an invalid pod: it lacks {error}") from error
        endpoint = WorkerEndpoint(name, str(Address(host, port or 0)), self.token, self.tls)
        if port is None:
            return AskedMachine(
                endpoint, reason=f"its pod has no container with a port named {PORT_NAME!r}", is_fault=True
            )
        if "deletionTimestamp" in pod["metadata"]:
            return AskedMachine(endpoint, reason="its pod is ending")
        if phase != "Running" or conditions.get("Ready") != "True":
            return AskedMachine(endpoint, reason=f"its pod is not ready (phase {phase})")
        return ask(endpoint, timeout_seconds)


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
        message = cleaned(answer.stderr.strip() or "it says nothing")
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
