"""Read a cluster from a YAML file, which is validated before any machine is contacted.

``docs/machines.md`` and ``docs/links.md`` describe the keys, which are those of `Machine`, `Link` and `SharedCores`. A
link from or to a group stands for one link per machine of the group. Paths are relative to the file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, ErrorDetails

from rpc_runtime.errors import InputError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles, token_from
from tvm_split.cluster.machine import STRICT, Cores, Link, Machine, SharedCores, SshAccess, faults
from tvm_split.errors import ClusterError
from tvm_split.parameters import Number
from tvm_split.units import meant_name, short_list
from tvm_split.values import UNKNOWN_KEY, Document, Location, causes, sentence, text_in, text_of

Pair = tuple[str, str]


@dataclass(frozen=True)
class _Machine:
    """The keys of a machine in a file: those of `Machine`, with those of its `WorkerEndpoint`."""

    __pydantic_config__ = STRICT

    name: str
    address: Annotated[str, AfterValidator(lambda text: str(Address.callable(text)))]
    token_file: Path | None = None
    tls: dict[Literal["ca", "certificate", "key"], Path] | None = None
    threads: Cores = 1
    target: Mapping[str, Any] | None = None
    memory_bytes: Annotated[int | None, Number] = None
    ssh: SshAccess | None = None
    standby: bool = False

    def machine(self, folder: Path, described_at: str) -> Machine:
        """Return the `Machine` that this entry describes, with the token read from its file.

        ``folder`` is the folder of the cluster file, to which its paths are relative. ``described_at`` is the entry's
        position, ``PATH:LINE``, for error messages.

        Raises:
            InputError: the token file is unusable, or only one of certificate and key is given.
            ClusterError: a TLS file is missing, or a value is out of bounds.
        """
        token = None if self.token_file is None else token_from(folder / self.token_file)
        files = {key: folder / path for key, path in (self.tls or {}).items()}
        for path in files.values():
            if not path.is_file():
                raise ClusterError(f"machine {self.name!r}: there is no TLS file {path}")
        tls = TlsFiles(files.get("ca"), files.get("certificate"), files.get("key")) if files else None
        worker = WorkerEndpoint(self.name, self.address, token.text if token else None, tls)
        ssh = self.ssh and replace(self.ssh, files={key: folder / path for key, path in self.ssh.files.items()})
        return Machine(self.name, self.threads, self.target, self.memory_bytes, worker, described_at, ssh, self.standby)


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = STRICT

    machines: Annotated[list[_Machine], Field(min_length=1)]
    groups: dict[str, list[str]] = field(default_factory=dict)
    links: list[Link] | None = None
    shared_cores: list[SharedCores] = field(default_factory=list)


_FORMS: dict[int | str, type] = {"machines": _Machine, "links": Link, "shared_cores": SharedCores, "ssh": SshAccess}
"""Forms of the mappings in a file, by their keys."""
_ALIASES = {(Link, "source"): "from", (Link, "destination"): "to", (SshAccess, "destination"): "to"}
EXAMPLES = {
    "machines": 'machines: [{name: desk, address: "192.0.2.10:7001"}]',
    "machines.name": "name: desk",
    "machines.address": 'address: "192.0.2.10:7001"',
    "machines.token_file": "token_file: token",
    "machines.tls": "tls: {ca: ca.pem, certificate: me.pem, key: me.key}",
    "machines.threads": "threads: 8",
    "machines.target": "target: {kind: llvm}",
    "machines.memory_bytes": "memory_bytes: 16e9",
    "machines.ssh": "ssh: {to: user@box}",
    "machines.standby": "standby: true",
    "machines.ssh.arguments": "arguments: [--insecure]",
    "groups": "groups: {lab: [desk, box]}",
    "links": "links: [{from: desk, to: box}]",
    "links.bytes_per_second": "bytes_per_second: 1.25e8",
    "links.latency_seconds": "latency_seconds: 0.001",
    "links.address": 'address: "192.0.2.10:7001"',
    "links.transport": "transport: grpc",
    "links.codec": "codec: fp16",
    "shared_cores": "shared_cores: [{machines: [desk, client], cores: 8}]",
}
"""What to write instead of a wrong value, by its keys; a key that is not here has the example of the one around it."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML silently takes the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if str(key.value) in lines:
                text = f"the key {key.value!r} is there twice, first in line {lines[str(key.value)]}; leave one"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_cluster_file(path: Path) -> tuple[tuple[Machine, ...], tuple[Link, ...], tuple[SharedCores, ...]]:
    """Return the machines, links and shared cores of a file, in its order.

    Raises:
        ClusterError: gives the file, the line and what is wrong there.
    """
    document = _read(path)
    file = _valid(document)
    machines: list[Machine] = []
    wrong: list[tuple[Location, str]] = []
    for index, entry in enumerate(file.machines):
        try:
            machines.append(entry.machine(path.parent, document.place(("machines", index, "target"))))
        except ClusterError as error:
            wrong.append((("machines", index), str(error)))
        except InputError as error:
            wrong.append((("machines", index), f"machine {entry.name!r}: {error}"))
    if wrong:
        raise document.complaint(wrong)
    try:
        members = members_of([machine.name for machine in machines], file.groups)
    except ClusterError as error:
        raise document.complaint([(("groups",), str(error))]) from error
    links, entry_of = _between_machines(document, file.links or [], members)
    shared = tuple(
        replace(shared_core, machines=machines_of(shared_core.machines, members)) for shared_core in file.shared_cores
    )

    def in_file(location: Location) -> Location:
        is_link = location[0] == "links" and len(location) > 1
        return ("links", entry_of[int(location[1])], *location[2:]) if is_link else location

    for fault in faults(machines, None if file.links is None else links, shared, groups=list(members)):
        first = f"; the first is in {document.place(in_file(fault.first))}" if fault.first else ""
        raise document.complaint([(in_file(fault.location), f"{fault.text}{first}")])
    return tuple(machines), tuple(links), shared


def _read(path: Path) -> Document:
    text = text_in(path, ClusterError, "the cluster file ")
    try:
        content = yaml.load(text, _Loader)  # noqa: S506 (safe)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        line = f":{mark.line + 1}" if mark else ""
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            problem = "indentation, colons, brackets or quotes are wrong here or in the line before"
        elif isinstance(error, yaml.constructor.ConstructorError):
            problem = "keys are plain text, and values are text, numbers, lists or dictionaries"
        raise ClusterError(f"{path}{line}: this is not YAML, such as {EXAMPLES['machines']}: {problem}") from error
    return Document(str(path), content, ClusterError, text)


def _valid(document: Document) -> _File:
    """Return the validated content of a document; raise one error that lists everything that is wrong in it."""
    try:
        return TypeAdapter(_File).validate_python(document.content)
    except ValidationError as error:
        raise document.complaint([(problem["loc"], _text(problem)) for problem in causes(error)]) from error


def _text(problem: ErrorDetails) -> str:
    """Return the text of a validation error, with a valid example, or with the key that the user probably meant."""
    text, (*place, key) = sentence(problem), problem["loc"] or ("",)
    keys = [step for step in problem["loc"] if isinstance(step, str)]
    if problem["type"] == UNKNOWN_KEY:
        form = next((_FORMS[step] for step in reversed(place) if step in _FORMS), _File)
        known = [_ALIASES.get((form, attribute.name), attribute.name) for attribute in fields(form)]
        meant = meant_name(key, known)
        if not meant:
            return f"{text}; there are {', '.join(known)}"
        text, keys[-1:] = text_of({**problem, "ctx": {"meant": meant}}), [meant]
    if problem["type"] == "value_error" and isinstance(problem["input"], dict | ArgsKwargs):
        return text  # the error of a whole entry says what to give
    prefixes = (".".join(keys[:count]) for count in range(len(keys), 0, -1))
    example = next((EXAMPLES[prefix] for prefix in prefixes if prefix in EXAMPLES), EXAMPLES["machines"])
    return f"{text} For example {example}" if text.endswith("?") else f"{text}; for example {example}"


def _between_machines(
    document: Document, entries: Sequence[Link], members: Mapping[str, tuple[str, ...]]
) -> tuple[list[Link], list[int]]:
    """Return the links between machines that entries with groups stand for, and the index of the entry of each link."""
    links, entry_of = [], []
    pairs_of_each = pairs_of_entries([(entry.source, entry.destination) for entry in entries], members)
    for index, (entry, pairs) in enumerate(zip(entries, pairs_of_each, strict=True)):
        try:
            links += [replace(entry, source=source, destination=destination) for source, destination in pairs]
        except ClusterError as error:
            raise document.complaint([(("links", index), str(error))]) from error
        entry_of += [index] * len(pairs)
    return links, entry_of


def members_of(machines: Iterable[str], groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the machines of each group, directly or through other groups.

    Raises:
        ClusterError: a group has the name of a machine, an unknown member, or contains itself.
    """
    names = {CLIENT, *machines}
    for name, members in groups.items():
        if name in names:
            raise ClusterError(f"group {name!r} has the name of a machine, or of the client; give it another")
        for member in members:
            if member not in names and member not in groups:
                known = short_list(sorted({*names, *groups} - {CLIENT}))
                raise ClusterError(f"group {name!r} has {member!r}, neither a machine nor a group; there are {known}")
    resolved: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    try:
        for name in TopologicalSorter(groups).static_order():
            if name not in names:
                resolved[name] = machines_of(groups[name], resolved)
    except CycleError as error:
        raise ClusterError(f"group {error.args[1][0]!r} is in itself, by {short_list(error.args[1][1:])}") from error
    return {name: resolved[name] for name in groups}


def machines_of(names: Iterable[str], members: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Replace each group name by the group's machines, and remove duplicates."""
    return tuple(dict.fromkeys(machine for name in names for machine in members.get(name, (name,))))


def pairs_of_entries(entries: Sequence[Pair], members: Mapping[str, Sequence[str]]) -> list[list[Pair]]:
    """Return the pairs of machines of each entry, without those that an entry with fewer pairs has (in any direction).

    An entry that names a pair of machines takes precedence over all entries that name groups. Entries with equally many
    pairs all count, so that the caller can report the duplicate.
    """
    fitting = [
        [(first, second) for first, second in product(*(members.get(end, (end,)) for end in ends)) if first != second]
        if members.keys() & {*ends}
        else [ends]
        for ends in entries
    ]
    sizes = [len(pairs) if members.keys() & {*ends} else 0 for ends, pairs in zip(entries, fitting, strict=True)]
    fewest: dict[Pair, int] = {}
    for size, pairs in zip(sizes, fitting, strict=True):
        for first, second in pairs:
            for pair in ((first, second), (second, first)):
                fewest[pair] = min(size, fewest.get(pair, size))
    return [[pair for pair in pairs if size <= fewest[pair]] for size, pairs in zip(sizes, fitting, strict=True)]
