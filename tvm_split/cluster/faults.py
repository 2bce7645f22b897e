"""Faults of names and of links between them, in a cluster or a planning problem."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from rpc_runtime.program.routes import CLIENT
from tvm_split.units import short_list
from tvm_split.values import Location


class Fault(NamedTuple):
    """What is wrong, and its path in a file, such as ``("links", 2, "from")``.

    ``first`` is the path of the other entry, if two entries contradict each other.
    """

    location: Location
    text: str
    first: Location | None = None


def repeated_names(what: str, names: Iterable[str]) -> Iterator[Fault]:
    """Yield the faults of names that two entries of the list ``{what}s`` have."""
    indices: dict[str, int] = {}
    for index, name in enumerate(names):
        first = indices.setdefault(name, index)
        if first != index:
            text = f"two {what}s are named {name!r}; give each a name of its own"
            yield Fault((f"{what}s", index, "name"), text, (f"{what}s", first, "name"))


def unknown_name(
    what: str, name: str, known: Collection[str], location: Location, groups: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield the fault of a name that is not ``known``; the message also suggests ``groups``."""
    if name not in known:
        listed = f", and the groups {short_list(groups)}" if groups else ""
        names = short_list([other for other in known if other != CLIENT])
        yield Fault(location, f"no {what} is named {name!r}; there are {names}{listed}")


def link_faults(
    links: Iterable[tuple[str, str]], known: Collection[str], groups: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield the faults of links, by source and destination: unknown ends, loops and duplicates."""
    indices: dict[tuple[str, str], int] = {}
    for index, ends in enumerate(links):  # there may be a million
        if not (ends[0] in known and ends[1] in known):
            for key, end in zip(("from", "to"), ends, strict=True):
                yield from unknown_name("machine", end, known, ("links", index, key), groups)
        elif ends[0] == ends[1]:
            text = f"the link from {ends[0]!r} joins a machine to itself; tensors inside a machine need no link"
            yield Fault(("links", index, "to"), text)
        first = indices.setdefault(ends, index)
        if first != index:
            text = f"a second link from {ends[0]!r} to {ends[1]!r}; leave one, or turn one round for the way back"
            yield Fault(("links", index), text, ("links", first))
