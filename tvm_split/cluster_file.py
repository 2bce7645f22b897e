"""A cluster as a file: YAML, checked before anything is contacted.

    machines:
      - name: desk
        address: 192.0.2.10:7001
        threads: 8
        target: {kind: llvm, mcpu: znver4}      # optional: what the worker says it is
        memory_bytes: 16e9                      # optional: no limit
        token_file: token                       # optional: the secret the worker was started with
        tls: {ca: ca.pem, certificate: client.pem, key: client.key}   # optional; certificate and key for mutual TLS
    links:                                      # optional
      - {from: desk, to: box, bytes_per_second: 1.25e8, latency_seconds: 0.001}

Paths in it are relative to the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rpc_runtime.client import WorkerEndpoint
from rpc_runtime.security import TlsFiles
from tvm_split.errors import ClusterError
from tvm_split.machine import Link, Machine
from tvm_split.yaml_lines import line_of


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class _Tls(_Strict):
    ca: Path
    certificate: Path | None = None
    key: Path | None = None


class _Machine(_Strict):
    name: str = Field(min_length=1)
    address: str
    threads: int = Field(default=1, ge=1)
    target: dict[str, Any] | None = None
    memory_bytes: float | None = Field(default=None, gt=0)
    token_file: Path | None = None
    tls: _Tls | None = None

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, separator, port = address.rpartition(":")
        if not (host and separator and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{address!r} is not HOST:PORT")
        return address


class _Link(_Strict):
    source: str = Field(alias="from")
    destination: str = Field(alias="to")
    bytes_per_second: float = Field(gt=0)
    latency_seconds: float = Field(default=0.0, ge=0)


class _ClusterFile(_Strict):
    machines: list[_Machine] = Field(min_length=1)
    links: list[_Link] = []


def read_cluster_file(path: Path) -> tuple[tuple[Machine, ...], tuple[Link, ...]]:
    """The machines and links in a file; a `ClusterError` gives the file, the line and what is expected there."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {path}: {error.strerror}") from error
    try:
        content = yaml.safe_load(text)
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is no YAML: {error}") from error
    try:
        parsed = _ClusterFile.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{path}:{line_of(tree, problem['loc'])}: {'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ClusterError("\n".join(problems)) from error
    _require_distinct_names(path, tree, parsed)
    folder = path.parent
    return (
        tuple(_machine(entry, folder) for entry in parsed.machines),
        tuple(
            Link(each.source, each.destination, each.bytes_per_second, each.latency_seconds) for each in parsed.links
        ),
    )


def _machine(entry: _Machine, folder: Path) -> Machine:
    token = None
    if entry.token_file is not None:
        try:
            token = (folder / entry.token_file).read_text().strip()
        except OSError as error:
            raise ClusterError(f"machine {entry.name!r}: cannot read its token file: {error}") from error
    tls = None
    if entry.tls is not None:
        certificate, key = entry.tls.certificate, entry.tls.key
        tls = TlsFiles(
            authority=folder / entry.tls.ca,
            certificate=folder / certificate if certificate else None,
            key=folder / key if key else None,
        )
    return Machine(
        name=entry.name,
        threads=entry.threads,
        target=entry.target,
        memory_bytes=None if entry.memory_bytes is None else int(entry.memory_bytes),
        endpoint=WorkerEndpoint(entry.name, entry.address, token, tls),
    )


def _require_distinct_names(path: Path, tree: yaml.Node | None, parsed: _ClusterFile) -> None:
    seen: dict[str, int] = {}
    for index, machine in enumerate(parsed.machines):
        line = line_of(tree, ("machines", index, "name"))
        if machine.name in seen:
            raise ClusterError(
                f"{path}:{line}: two machines are named {machine.name!r}, the first in line {seen[machine.name]}"
            )
        seen[machine.name] = line
    for index, link in enumerate(parsed.links):
        for key, end in (("from", link.source), ("to", link.destination)):
            if end not in seen:
                line = line_of(tree, ("links", index, key))
                raise ClusterError(f"{path}:{line}: no machine is named {end!r}; there are {', '.join(seen)}")
