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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from rpc_runtime.errors import InputError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles, token_from
from tvm_split.cluster.machine import STRICT, Link, Machine, SshAccess, faults
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import ClusterError
from tvm_split.units import short_list
from tvm_split.values import Document, Location, line_of, sentence

Value = TypeVar("Value")
Pair = tuple[str, str]
MOST_SHOWN = 8
"""The number of groups that an error message about a cycle lists."""


@dataclass(frozen=True)
class _Access:
    """The keys of a machine in a file that become its `WorkerEndpoint`."""

    __pydantic_config__ = STRICT

    address: Annotated[str, AfterValidator(lambda text: str(Address.callable(text)))]
    token_file: Path | None = None
    tls: dict[Literal["ca", "certificate", "key"], Path] | None = None

    def endpoint(self, machine: str, folder: Path) -> WorkerEndpoint:
        """Return the endpoint; paths are relative to ``folder``. Raises InputError for unusable credentials."""
        token = None if self.token_file is None else token_from(folder / self.token_file)
        files = {key: folder / path for key, path in (self.tls or {}).items()}
        tls = TlsFiles(files.get("ca"), files.get("certificate"), files.get("key")) if files else None
        return WorkerEndpoint(machine, self.address, token.text if token else None, tls)


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = STRICT

    machines: Annotated[list[dict[str, Any]], Field(min_length=1)]
    groups: dict[str, list[str]] = field(default_factory=dict)
    links: list[dict[str, Any]] | None = None
    shared_cores: list[SharedCores] = field(default_factory=list)


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


class _Checked:
    """A document whose parts are validated one by one, to report all faults together."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._faults: list[tuple[Location, str]] = []

    def value(self, form: type[Value], content: Any, *place: int | str) -> Value | None:
        """Return the part at ``place`` as a value; None if it is invalid, which `require_valid` then raises."""
        try:
            return TypeAdapter(form).validate_python(content)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                location = (*place, *problem["loc"])
                keys = _keys_of(next((_INNER[step] for step in location[-2::-1] if step in _INNER), form))
                text = sentence(problem)
                if problem["type"] == "unexpected_keyword_argument":
                    close = difflib.get_close_matches(str(location[-1]), keys, n=1)
                    text += f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(keys)}"
                self.add(location, text)
            return None

    def add(self, location: Location, text: str) -> None:
        """Note a fault at the part with these keys and positions; `require_valid` raises it."""
        self._faults.append((location, text))

    def require_valid(self) -> None:
        if self._faults:
            raise self._document.complaint(dict.fromkeys(self._faults))


def read_cluster_file(path: Path) -> tuple[tuple[Machine, ...], tuple[Link, ...], tuple[SharedCores, ...]]:
    """Return the machines, links and shared cores of a file, in its order.

    Raises:
        ClusterError: gives the file, the line and what is wrong there.
    """
    document, tree = _read(path)
    checked = _Checked(document)
    file = checked.value(_File, document.content)
    entries = [] if file is None else file.machines
    read_machines = [_machine(checked, tree, path, entry, index) for index, entry in enumerate(entries)]
    checked.require_valid()
    assert file is not None  # noqa: S101 (valid)
    machines = tuple(machine for machine in read_machines if machine is not None)
    try:
        members = members_of([machine.name for machine in machines], file.groups)
    except ClusterError as error:
        raise document.complaint([(("groups",), str(error))]) from error
    links, entry_of = _links(checked, file.links or [], members)
    checked.require_valid()
    shared = tuple(
        replace(shared_core, machines=machines_of(shared_core.machines, members)) for shared_core in file.shared_cores
    )

    def in_file(location: Location) -> Location:
        is_link = location[0] == "links" and len(location) > 1
        return ("links", entry_of[int(location[1])], *location[2:]) if is_link else location

    for fault in faults(machines, None if file.links is None else links, shared, groups=list(members)):
        first = f"; the first is in line {line_of(tree, in_file(fault.first))}" if fault.first else ""
        raise document.complaint([(in_file(fault.location), f"{fault.text}{first}")])
    return machines, tuple(links), shared


def _read(path: Path) -> tuple[Document, yaml.Node | None]:
    """Return the content of the file, and its YAML nodes, which have line numbers."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"cannot read the cluster file {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        content, tree = yaml.load(text, _Loader), yaml.compose(text, Loader=yaml.SafeLoader)  # noqa: S506 (safe)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ClusterError(f"{path}{line}: this is no YAML: {getattr(error, 'problem', None) or error}") from error
    return Document(str(path), content, ClusterError, text), tree


def _machine(
    checked: _Checked, tree: yaml.Node | None, path: Path, entry: Mapping[str, Any], index: int
) -> Machine | None:
    place, of_access = ("machines", index), _keys_of(_Access)
    machine = checked.value(Machine, {key: value for key, value in entry.items() if key not in of_access}, *place)
    access = checked.value(_Access, {key: entry[key] for key in of_access if key in entry}, *place)
    for key in _HIDDEN & entry.keys():
        checked.add((*place, key), "there is no such key")
    if machine is None or access is None:
        return None
    try:
        endpoint = access.endpoint(machine.name, path.parent)
    except InputError as error:
        checked.add(place, f"machine {machine.name!r}: {error}")
        return None
    described_at = f"{path}:{line_of(tree, (*place, 'target'))}"
    return replace(machine, endpoint=endpoint, described_at=described_at)


def _links(
    checked: _Checked, entries: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[str, ...]]
) -> tuple[list[Link], list[int]]:
    """Return the links between machines that the entries stand for, and each one's index in the entries."""
    ends, templates = [], []
    for index, entry in enumerate(entries):
        source, destination = str(entry.get("from")), str(entry.get("to"))
        # A group may have links to itself. Names are validated later, with all links together.
        is_inside = source == destination and source in members
        link = checked.value(Link, {**entry, "to": "another"} if is_inside else entry, "links", index)
        if link is not None:
            ends.append((source, destination))
            templates.append((index, link))
    links, entry_of = [], []
    for (index, link), pairs in zip(templates, pairs_of_entries(ends, members), strict=True):
        try:
            links += [replace(link, source=source, destination=destination) for source, destination in pairs]
        except ClusterError as error:
            checked.add(("links", index), str(error))
        entry_of += [index] * len(pairs)
    return links, entry_of


_INNER: dict[str | int, type] = {"ssh": SshAccess, "shared_cores": SharedCores}
"""Forms of mappings that are validated together with what contains them, by their keys."""


def _keys_of(form: type) -> list[str]:
    """Return the keys of a form in a file; those of a machine include its `_Access`."""
    names = [
        _ALIASES.get((form, attribute.name), attribute.name)
        for attribute in fields(form)
        if attribute.name not in _HIDDEN
    ]
    return [names[0], *_keys_of(_Access), *names[1:]] if form is Machine else names


_HIDDEN = {"endpoint", "described_at"}
"""Fields of a machine that no file can set."""
_ALIASES = {(Link, "source"): "from", (Link, "destination"): "to", (SshAccess, "destination"): "to"}


def members_of(machines: Iterable[str], groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the machines of each group, directly or through other groups.

    Raises:
        ClusterError: a group has the name of a machine, an unknown member, or contains itself.
    """
    machine_names = {CLIENT, *machines}
    resolved: dict[str, tuple[str, ...]] = {}
    for name in groups:
        if name in machine_names:
            raise ClusterError(f"group {name!r} has the name of a machine, or of the client; give it another")
        _resolve(name, groups, machine_names, resolved)
    return resolved


def _resolve(
    name: str, groups: Mapping[str, Sequence[str]], machine_names: set[str], resolved: dict[str, tuple[str, ...]]
) -> None:
    """Find a group's machines, inner groups first; without recursion, since files may nest thousands of groups."""
    inside = {name: iter(groups[name])}  # the groups being expanded, with their members left to visit
    while inside:
        group = next(reversed(inside))
        member = next(
            (candidate for candidate in inside[group] if candidate not in machine_names and candidate not in resolved),
            None,
        )
        if member is None:
            parts = (resolved.get(candidate, (candidate,)) for candidate in groups[group])
            resolved[group] = tuple(dict.fromkeys(machine for part in parts for machine in part))
            del inside[group]
        elif member in inside:
            names = list(inside)
            circle = [*names[names.index(member) :], member]
            way = circle if len(circle) <= MOST_SHOWN else [*circle[: MOST_SHOWN - 2], "…", member]
            raise ClusterError(f"group {member!r} is in itself: {' → '.join(way)}")
        elif member not in groups:
            raise ClusterError(
                f"group {group!r} has {member!r}, which is no machine or group; there are "
                f"{short_list(sorted({*machine_names, *groups} - {CLIENT}))}"
            )
        else:
            inside[member] = iter(groups[member])


def machines_of(names: Iterable[str], members: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Replace each group name by the group's machines, and remove duplicates."""
    return tuple(dict.fromkeys(machine for name in names for machine in members.get(name, (name,))))


def pairs_of_entries(entries: Sequence[Pair], members: Mapping[str, Sequence[str]]) -> list[list[Pair]]:
    """Return, for each entry, the pairs of machines that no entry with fewer pairs covers, in either direction.

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
