"""The base class of launchers, which find a cluster's machines and start their workers, and their registry."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable
from urllib.parse import parse_qsl

from pydantic import ConfigDict, ValidationError

from rpc_runtime.client.worker_client import WorkerDescription, describe
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.registry import Registry
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles, token_from
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError
from tvm_split.parameters import Seconds
from tvm_split.values import UNKNOWN_KEY, adapter_of, first_repeated, sentence

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster

FILE_SUFFIXES = (".yaml", ".yml", ".json")
TLS_KEYS = {"tls_ca": "authority", "tls_certificate": "certificate", "tls_key": "key"}


@dataclass(frozen=True)
class AskedMachine:
    """A machine with its worker's description, or with the ``reason`` why nothing can be deployed to it.

    ``is_fault`` says whether the reason is a fault, as opposed to a normal state such as tuning. ``threads`` is the
    number that a service lists, None if it lists none.
    """

    endpoint: WorkerEndpoint
    worker: WorkerDescription | None = None
    reason: str = ""
    is_fault: bool = False
    threads: int | None = None

    @property
    def name(self) -> str:
        return self.endpoint.machine

    @property
    def machine(self) -> Machine | None:
        """The machine to plan on; None if there is a ``reason`` against it."""
        if self.reason or self.worker is None:
            return None
        return Machine(self.name, self.worker.threads, endpoint=self.endpoint)


def ask_worker(endpoint: WorkerEndpoint, timeout_seconds: float) -> AskedMachine:
    """Return the description of the worker at ``endpoint``, whose name may differ; or the error, as a fault.

    The text of the error calls the worker "it", so that the caller can begin a message with the machine.
    """
    try:
        return AskedMachine(endpoint, describe(endpoint, timeout_seconds))
    except TvmSplitError as error:
        words = str(error).replace(str(endpoint), "it")  # the caller names the machine
        return AskedMachine(endpoint, reason=words, is_fault=True)


def worker_misfit(machine: Machine, worker: WorkerDescription) -> str:
    """Return why a worker's name or threads do not fit its machine's, and what to do; empty if they do.

    A worker without ``--name`` reports its host's name, and then matches any machine.
    """
    if worker.machine not in (machine.name, worker.hostname):
        return (
            f"the worker that answers for machine {machine.name!r} is {worker.machine!r}; give each machine the "
            f"address of its own worker, or start that one with --name={shlex.quote(machine.name)}"
        )
    if machine.threads > worker.threads:
        return (
            f"machine {machine.name!r} is described with {machine.threads} threads, its worker uses "
            f"{worker.threads}; start it with --threads {machine.threads}, or set threads: {worker.threads}"
        )
    return ""


@runtime_checkable
class Started(Protocol):
    """The running workers of one cluster; they run until `close`."""

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        """Return the current endpoint of each machine's worker. Raises WorkerUnavailableError, DeadlineError."""

    def close(self) -> None:
        """End the workers that this object started. May be called again."""


class Launcher(ABC):
    """One kind of cluster. Subclasses are frozen dataclasses whose fields are the parameters of a location.

    `Cluster.at` takes locations: ``NAME[:ARGUMENT][?FIELD=VALUE&…]``; ``argument`` names the field of ``ARGUMENT``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    in_process: ClassVar[bool] = False
    """Whether stages are called in this process, without workers."""
    on_this_host: ClassVar[bool] = False
    """Whether all machines are on this host, so that their cores are known without asking a worker."""
    starts_more: ClassVar[bool] = False
    """Whether `start` starts a worker for every machine that is added to the cluster."""

    @abstractmethod
    def find(self) -> Cluster:
        """Return a cluster of the current machines; its ``left_out`` has those that nothing can be deployed to.

        Raises:
            ClusterError: there is none, or the description is wrong.
            WorkerUnavailableError, DeadlineError, ProtocolError: the service that lists the machines does not answer,
                or answers wrongly.
        """

    def ask(self, timeout_seconds: float = 5.0) -> Sequence[AskedMachine] | None:
        """Ask the workers that a service lists, also where nothing can be deployed to; None if there is no service.

        Raises:
            WorkerUnavailableError, DeadlineError, ProtocolError: as `find`, but not for a worker that does not answer.
        """
        return None

    def start(self, cluster: Cluster) -> Started:
        """Start the workers of a cluster that `find` returned. By default they run already at the machines' addresses.

        Raises:
            ClusterError, WorkerUnavailableError, DeadlineError: a worker does not start.
        """
        return Running(endpoints_of(cluster))


@dataclass
class Running:
    """Workers that already ran, with their endpoints by machine; `close` does not end them."""

    by_machine: Mapping[str, WorkerEndpoint]

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return self.by_machine

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class WithAccess:
    """The fields of launchers that use one token and one set of TLS files for all machines."""

    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    timeout_seconds: Seconds = 5.0


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "tvm_split.launchers",
    "launcher",
    {
        "local": "tvm_split.launchers.local:Local",
        "in-process": "tvm_split.launchers.local:InProcess",
        "file": "tvm_split.launchers.running:ClusterFile",
        "at": "tvm_split.launchers.running:At",
        "tracker": "tvm_split.launchers.running:Tracker",
        "kubernetes": "tvm_split.launchers.running:Kubernetes",
        "ray": "tvm_split.launchers.ray:Ray",
    },
    base=Launcher,
    unknown=ClusterError,
)


def launcher_at(location: str, **further: Any) -> Launcher:
    """Return the launcher of a location: ``local:3?threads=2``, ``tracker:lab:9190?key=box``, …, else a YAML file.

    ``further`` are further fields of the launcher; they override those of the location.

    All launchers whose machines a service lists accept the paths ``token_file``, ``tls_ca``, ``tls_certificate`` and
    ``tls_key``. Without a ``token_file`` the token is that of ``$TVM_SPLIT_TOKEN``.

    Raises:
        ClusterError: no launcher has this name, or one of its fields is invalid.
        InputError: the token file cannot be read.
    """
    head, _, query = location.partition("?")
    name, _, argument = head.partition(":")
    if name not in LAUNCHERS and (head.endswith(FILE_SUFFIXES) or Path(head).exists()):
        name, argument = "file", head
    kind = LAUNCHERS[name]
    if argument and not kind.argument:
        raise _wrong(kind, location, f"{name} takes nothing after a colon")
    pairs = [*([(kind.argument, argument)] if argument else []), *parse_qsl(query, keep_blank_values=True)]
    repeated = first_repeated(key for key, _ in pairs)
    if repeated is not None:
        raise _wrong(kind, location, f"{repeated} has two values; give one")
    parameters: dict[str, Any] = dict(pairs)
    if issubclass(kind, WithAccess):
        for key in {"token", "tls"} & parameters.keys():
            files = "token_file" if key == "token" else ", ".join(TLS_KEYS)
            raise _wrong(kind, location, f"a location names files and has no {key}; give {files}, or {key}= in Python")
        parameters |= _access(parameters)
    try:
        return cast(Launcher, adapter_of(kind).validate_python({**parameters, **further}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or kind.name
        text = "unknown" if first["type"] == UNKNOWN_KEY else sentence(first)
        raise _wrong(kind, location, f"{place}: {text}") from error


def _wrong(kind: type[Launcher], shown: str, text: str) -> ClusterError:
    names = [attribute.name for attribute in fields(kind) if attribute.name not in ("token", "tls")]  # type: ignore[arg-type]
    access = ["token_file", *TLS_KEYS] if issubclass(kind, WithAccess) else []
    return ClusterError(f"{shown!r}: {text}; its parameters are {', '.join([*names, *access])}")


def _access(parameters: dict[str, Any]) -> dict[str, Any]:
    """Remove the credential files from a location's parameters, and return the token and TLS files they stand for."""
    tls = {place: Path(parameters.pop(key)) for key, place in TLS_KEYS.items() if key in parameters}
    token = token_from(Path(parameters.pop("token_file")) if "token_file" in parameters else None)
    return {"token": token.text if token else None, "tls": TlsFiles(**tls) if tls else None}


def endpoints_of(cluster: Cluster) -> dict[str, WorkerEndpoint]:
    """Return the endpoints that a cluster's machines have. Raises `ClusterError` for a machine without one."""
    for machine in cluster.machines:
        if machine.endpoint is None:
            text = f"machine {machine.name!r} has no address; give the HOST:PORT on which its worker listens"
            raise ClusterError(text)
    return {machine.name: machine.endpoint for machine in cluster.machines if machine.endpoint is not None}
