"""Groups of machines with common links, by host, rack or site: expand an entry for a group to pairs of machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import ClusterError
from tvm_split.units import short_list

Pair = tuple[str, str]
MOST_SHOWN = 8
"""The number of groups that an error message about a cycle lists."""


def members_of(machines: Iterable[str], groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the machines of each group, directly or through other groups.

    Raises:
        ClusterError: a group has the name of a machine, an unknown member, or contains itself.
    """
    known = {CLIENT, *machines}
    found: dict[str, tuple[str, ...]] = {}
    for name in groups:
        if name in known:
            raise ClusterError(f"group {name!r} has the name of a machine, or of the client; give it another")
        _resolve(name, groups, known, found)
    return found


def _resolve(
    name: str, groups: Mapping[str, Sequence[str]], known: set[str], found: dict[str, tuple[str, ...]]
) -> None:
    """Find a group's machines, inner groups first; without recursion, since files may nest thousands of groups."""
    inside = {name: iter(groups[name])}  # the groups being expanded, with their members left to visit
    while inside:
        group = next(reversed(inside))
        member = next((each for each in inside[group] if each not in known and each not in found), None)
        if member is None:
            parts = (found.get(each, (each,)) for each in groups[group])
            found[group] = tuple(dict.fromkeys(machine for part in parts for machine in part))
            del inside[group]
        elif member in inside:
            names = list(inside)
            circle = [*names[names.index(member) :], member]
            way = circle if len(circle) <= MOST_SHOWN else [*circle[: MOST_SHOWN - 2], "…", member]
            raise ClusterError(f"group {member!r} is in itself: {' → '.join(way)}")
        elif member not in groups:
            raise ClusterError(
                f"group {group!r} has {member!r}, which is no machine or group; there are "
                f"{short_list(sorted({*known, *groups} - {CLIENT}))}"
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
        [(one, other) for one, other in product(*(members.get(end, (end,)) for end in ends)) if one != other]
        if members.keys() & {*ends}
        else [ends]
        for ends in entries
    ]
    sizes = [len(pairs) if members.keys() & {*ends} else 0 for ends, pairs in zip(entries, fitting, strict=True)]
    fewest: dict[Pair, int] = {}
    for size, pairs in zip(sizes, fitting, strict=True):
        for one, other in pairs:
            for pair in ((one, other), (other, one)):
                fewest[pair] = min(size, fewest.get(pair, size))
    return [[pair for pair in pairs if size <= fewest[pair]] for size, pairs in zip(sizes, fitting, strict=True)]
