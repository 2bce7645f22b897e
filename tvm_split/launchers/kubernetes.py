"""Find the workers that run as pods of Kubernetes, with ``kubectl`` and its configuration.

https://kubernetes.io/docs/concepts/workloads/pods/. No client library is used: kubectl already has the user's contexts,
logins and proxies.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpc_runtime.client.worker_client import on_every_machine
from rpc_runtime.errors import DeadlineError, ProtocolError, WorkerUnavailableError
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.foreign_text import cleaned
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import AskedMachine, Launcher, Listed, Started, WithAccess, ask, planned_machines

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
