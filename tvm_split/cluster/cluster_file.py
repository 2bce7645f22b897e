"""Read a cluster from a YAML file, which is validated before any machine is contacted.

    machines:
      - name: desk
        address: 192.0.2.10:7001
        threads: 8
        target: {kind: llvm, mcpu: znver4}      # optional: by default the target that the worker reports
        memory_bytes: 16e9                      # optional: by default no limit
        token_file: token                       # optional: the worker's secret; found automatically on loopback
        tls: {ca: ca.pem, certificate: client.pem, key: client.key}   # optional; certificate and key for mutual TLS
        ssh: {to: me@desk, python: python3.12, folder: ~/.cache/tvm-split/ssh, arguments: [--insecure]}   # optional
    links:                                      # optional: without it, every link is measured
      - {from: desk, to: box, bytes_per_second: 1.25e8, latency_seconds: 0.001}   # used as stated, not measured
      - {from: desk, to: edge, address: 10.0.0.7:7001}   # measured; the address at which desk reaches edge
      - {from: box, to: edge, bytes_per_second: 0}       # closed: no transfer between the two
      - {from: client, to: edge, bytes_per_second: 2e6}  # optional: client is the deploying machine
      - {from: edge, to: client, codec: auto}            # optional: the codec of tensors; default none
    groups:                                     # optional: machines with common links, by host, rack or site
      lab: [desk, box]
      campus: [lab, edge]                       # contains machines and other groups
    shared_cores:                               # optional: by default the workers report them
      - {machines: [lab, client], cores: 8}     # together they have 8 cores; machines, groups, client

A link from or to a group stands for one link per machine of the group. A link from a group to itself stands for one
between any two of its machines. If several entries fit a pair of machines, the pair's own entry counts, otherwise the
entry with the fewest pairs. A link counts in both directions unless its reverse is listed too; its ``address`` counts
in its own direction only. With ``links``, every pair of machines needs a link, so that none is forgotten. Paths are
relative to the file.
"""

from __future__ import annotations

import difflib
import reprlib
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from rpc_runtime.errors import InputError
from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import AUTO, TRANSPORTS
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles, split_address, token_from
from tvm_split.cluster.groups import machines_of, members_of, pairs_of_entries
from tvm_split.cluster.machine import AUTO_CODEC, Link, Machine, SshAccess, faults, is_link_codec
from tvm_split.cluster.shared_cores import MOST_CORES, SharedCores
from tvm_split.errors import ClusterError
from tvm_split.units import MOST_AMOUNT, few_lines
from tvm_split.values import line_of

LONGEST_SHOWN = 80
"""The number of a value's characters that a message shows."""
_CORES = f"a whole number from 1 up, {MOST_CORES} at most"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    return value


# YAML 1.1 reads 16e9 as a string, because it has no decimal point and its exponent has no sign.
_Number = Annotated[float, BeforeValidator(_no_truth_value)]


def _machine_name(name: str) -> str:
    if name == CLIENT:
        raise ValueError("reserved")
    return name


def _host_and_port(address: str) -> str:
    if split_address(address)[1] == 0:
        raise ValueError("nobody listens on port 0")
    return address


def _known_transport(transport: str) -> str:
    if transport != AUTO and transport not in TRANSPORTS:
        raise ValueError
    return transport


def _known_codec(codec: str) -> str:
    if not is_link_codec(codec):
        raise ValueError("unknown")
    return codec


class _Tls(_Strict):
    ca: Path = Field(description="the path of a PEM file")
    certificate: Path | None = Field(default=None, description="the path of a PEM file")
    key: Path | None = Field(default=None, description="the path of a PEM file")

    @model_validator(mode="after")
    def check_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("one without the other")
        return self


class _Ssh(_Strict):
    to: str = Field(pattern=r"^[^-\s]\S*$", description="what ssh is called with, like box or me@box")
    python: str = Field(default="python3", min_length=1, description="the command that starts Python there")
    folder: str = Field(default=SshAccess.folder, min_length=1, description="a folder there")
    arguments: list[str] = Field(default=[], description="a list of further options of `tvm-split worker`")


class _Machine(_Strict):
    name: str = Field(min_length=1, description=f"a text other than {CLIENT!r}")
    address: str = Field(description="HOST:PORT of its worker, like 192.0.2.10:7001")
    threads: int = Field(default=1, ge=1, le=MOST_CORES, strict=True, description=_CORES)
    target: dict[str, Any] | None = Field(default=None, description="a TVM target, like {kind: llvm, mcpu: znver4}")
    memory_bytes: _Number | None = Field(
        default=None, gt=0, le=MOST_AMOUNT, description=f"a number of bytes above 0, like 16e9; {MOST_AMOUNT:g} at most"
    )
    token_file: Path | None = Field(default=None, description="the path of a file")
    tls: _Tls | None = Field(
        default=None, description="a mapping of ca, and of both certificate and key or neither, to paths"
    )

    ssh: _Ssh | None = Field(
        default=None, description="a mapping of to, and of python, folder and arguments where they are not the usual"
    )

    check_name = field_validator("name")(_machine_name)
    check_address = field_validator("address")(_host_and_port)


class _Link(_Strict):
    source: str = Field(alias="from", description=f"the name of a machine or group, or {CLIENT!r}")
    destination: str = Field(alias="to", description=f"the name of a machine or group, or {CLIENT!r}")
    bytes_per_second: _Number | None = Field(
        default=None,
        ge=0,
        le=MOST_AMOUNT,
        description=f"a number of bytes a second, like 1.25e8; {MOST_AMOUNT:g} at most, 0 if nothing may pass",
    )
    latency_seconds: _Number = Field(
        default=0.0,
        ge=0,
        le=MOST_AMOUNT,
        description=f"a number of seconds from 0 up, like 0.001; {MOST_AMOUNT:g} at most",
    )
    address: str | None = Field(default=None, description="HOST:PORT where `from` reaches the worker of `to`")
    transport: str = Field(
        default=AUTO, description=f"one of {', '.join((AUTO, *TRANSPORTS.built_in))} (nccl: from GPU to GPU)"
    )
    codec: str = Field(default=NONE, description=f"one of {', '.join((AUTO_CODEC, *CODECS.built_in))}")

    check_address = field_validator("address")(_host_and_port)
    check_transport = field_validator("transport")(_known_transport)
    check_codec = field_validator("codec")(_known_codec)


class _SharedCores(_Strict):
    machines: list[str] = Field(min_length=1, description=f"a list of machines, groups, or {CLIENT!r}")
    cores: int = Field(ge=1, strict=True, description=_CORES)


class _ClusterFile(_Strict):
    machines: list[_Machine] = Field(min_length=1, description="a list of at least one machine")
    groups: dict[str, list[str]] = Field(default={}, description="a mapping of names to lists of machines and groups")
    links: list[_Link] | None = Field(default=None, description="a list of links")
    shared_cores: list[_SharedCores] = Field(default=[], description="a list of machines that share cores")


_SECTIONS: dict[str, type[BaseModel]] = {"machines": _Machine, "links": _Link, "shared_cores": _SharedCores}


def read_cluster_file(path: Path) -> tuple[tuple[Machine, ...], tuple[Link, ...], tuple[SharedCores, ...]]:
    """Return the machines, links and shared cores of a file, in its order.

    Raises:
        ClusterError: gives the file, the line and what is expected there.
    """
    content, tree = _read(path)
    try:
        parsed = _ClusterFile.model_validate(content)
    except ValidationError as error:
        problems = {f"{path}:{line_of(tree, each['loc'])}: {_problem(each)}" for each in error.errors()}
        raise ClusterError(few_lines(sorted(problems), len(problems))) from error
    machines = []
    for index, said in enumerate(parsed.machines):
        place = f"{path}:{line_of(tree, ('machines', index, 'target'))}"
        try:
            ssh = _ssh_access(said)
        except ClusterError as error:
            place = f"{path}:{line_of(tree, ('machines', index, 'ssh', 'arguments'))}"
            raise ClusterError(f"{place}: machine {said.name!r}: {error}") from error
        machines.append(_machine(said, path.parent, place, ssh))
    try:
        members = members_of([machine.name for machine in machines], parsed.groups)
    except ClusterError as error:
        raise ClusterError(f"{path}:{line_of(tree, ('groups',))}: {error}") from error
    listed = parsed.links or []
    pairs_of = pairs_of_entries([(entry.source, entry.destination) for entry in listed], members)
    links, entry_of = [], []
    for index, (entry, pairs) in enumerate(zip(listed, pairs_of, strict=True)):
        try:
            links += [Link(**{**dict(entry), "source": source, "destination": end}) for source, end in pairs]
        except ClusterError as error:
            raise ClusterError(f"{path}:{line_of(tree, ('links', index))}: {error}") from error
        entry_of += [index] * len(pairs)

    shared = [SharedCores(machines_of(entry.machines, members), entry.cores) for entry in parsed.shared_cores]

    def line(location: tuple[int | str, ...]) -> int:
        if location[0] == "links" and len(location) > 1:
            location = ("links", entry_of[int(location[1])], *location[2:])
        return line_of(tree, location)

    for fault in faults(machines, None if parsed.links is None else links, shared, groups=list(members)):
        first = f"; the first is in line {line(fault.first)}" if fault.first else ""
        raise ClusterError(f"{path}:{line(fault.location)}: {fault.text}{first}")
    return tuple(machines), tuple(links), tuple(shared)


def _read(path: Path) -> tuple[Any, yaml.Node | None]:
    """Return the content of the file, and its YAML nodes, which have line numbers."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"the cluster file {path} is no text: {error}") from error
    try:
        content, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is no YAML: {error}") from error
    _require_single_keys(path, tree)
    return content, tree


def _problem(error: Any) -> str:
    """Return a sentence that says which value is wrong and what is expected there."""
    location = tuple(error["loc"])
    if "target" in location:  # TVM validates the content of a target; only its keys are checked here
        location = location[: location.index("target") + 1]
    where = _dotted(location)
    if error["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in _model_at(location[:-1]).model_fields.items()]
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        return f"{where}: unknown key {location[-1]!r}; {meant}Known here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{where} is missing; expected is {_expected(location)}"
    if location[:1] == ("groups",):
        location = ("groups",)
    return f"{where or 'the file'} is {_shortened(error['input'])}; expected is {_expected(location)}"


def _shortened(value: object) -> str:
    """Return the value's repr, shortened to `LONGEST_SHOWN` characters."""
    text = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _dotted(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the pydantic model that validates this location of the file."""
    if not location:
        return _ClusterFile
    if location[-1] in ("tls", "ssh"):
        return _Tls if location[-1] == "tls" else _Ssh
    return _SECTIONS[str(location[0])]


def _expected(location: tuple[int | str, ...]) -> str:
    if len(location) > 2 and isinstance(location[-1], int):  # an item of a list in a mapping
        location = location[:-1]
    if location and isinstance(location[-1], str):
        for name, field in _model_at(location[:-1]).model_fields.items():
            if location[-1] in (name, field.alias):
                return str(field.description)
    model = _model_at(location)
    return f"a mapping with the keys {', '.join(field.alias or name for name, field in model.model_fields.items())}"


def _ssh_access(entry: _Machine) -> SshAccess | None:
    ssh = entry.ssh
    return None if ssh is None else SshAccess(ssh.to, ssh.python, ssh.folder, tuple(ssh.arguments))


def _machine(entry: _Machine, folder: Path, place: str, ssh: SshAccess | None) -> Machine:
    token = None
    if entry.token_file is not None:
        try:
            token = token_from(folder / entry.token_file)
        except InputError as error:
            raise ClusterError(f"machine {entry.name!r}: {error}") from error
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
        endpoint=WorkerEndpoint(entry.name, entry.address, None if token is None else token.text, tls),
        described_at=place,
        ssh=ssh,
    )


def _require_single_keys(path: Path, tree: yaml.Node | None) -> None:
    """Raise a `ClusterError` for a duplicate key, of which YAML silently takes the last value."""
    waiting, seen = [tree], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias may refer to an enclosing node
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    raise ClusterError(
                        f"{path}:{line}: the key {name!r} stands in line {lines[name]} already; leave one"
                    )
                lines[name] = line
                waiting.append(value)
