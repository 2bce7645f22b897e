"""Which entry of a problem counts where entries for groups of machines overlap: a pair's own, else that of the fewest.

A thousand machines have a million links, of which a dozen entries may say all. So groups are not listed as pairs: each
pair of machines gets the number of the entry that counts for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rpc_runtime.program.program import CLIENT
from tvm_split.cluster.groups import members_of
from tvm_split.planner.problem import Piece, Problem

Numbers = npt.NDArray[np.intp]
Members = Mapping[str, Sequence[str]]


class Entries:
    """What the groups and links of a problem come to: found when first asked for, and once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The machines of each group; errors as of `members_of`."""
        return members_of([machine.name for machine in self._problem.machines], self._problem.groups)

    @cached_property
    def of_pairs(self) -> tuple[Numbers, dict[int, tuple[str, str]]]:
        """As `entries_of_pairs`."""
        return entries_of_pairs(self._problem, self.members)


def entries_of_pairs(problem: Problem, members: Members) -> tuple[Numbers, dict[int, tuple[str, str]]]:
    """The number of the link that counts for each pair of machines; and those that say a second time what one says.

    Of several that fit a pair its own counts, else that of the fewest pairs. Links with an end that there is not are
    left out.

    Returns:
        (M + 1, M + 1), row the source, −1 where there is no link; the client is last. By the number of each link that
        has a pair for which another one of as many pairs would count as well, and none before them: such a pair.
    """
    names = [*(machine.name for machine in problem.machines), CLIENT]
    number = {name: place for place, name in enumerate(names)}
    of_group = {name: np.array([number[each] for each in own], dtype=np.intp) for name, own in members.items()}
    grouped: list[tuple[int, int, Numbers, Numbers]] = []
    single: list[tuple[int, int, int]] = []
    for entry, link in enumerate(problem.links):
        source, end = number.get(link.source), number.get(link.destination)
        if source is not None and end is not None:
            single.append((entry, source, end))
        elif (source is not None or link.source in of_group) and (end is not None or link.destination in of_group):
            rows = of_group[link.source] if source is None else np.array([source])
            columns = of_group[link.destination] if end is None else np.array([end])
            pairs = len(rows) * len(columns) - len(np.intersect1d(rows, columns))
            grouped.append((pairs, entry, rows, columns))
    found = np.full((len(names), len(names)), -1, dtype=np.intp)
    fewest = np.zeros_like(found)
    again = np.full_like(found, -1)  # the last one of as many pairs as that which counts
    for pairs, entry, rows, columns in sorted(grouped, key=lambda each: -each[0]):
        here = np.ix_(rows, columns)
        again[here] = np.where(fewest[here] == pairs, entry, -1)
        found[here], fewest[here] = entry, pairs
    twice: dict[int, tuple[str, str]] = {}
    if single:
        entries, sources, ends = np.array(single, dtype=np.intp).T
        doubled = np.ones(len(entries), dtype=bool)
        doubled[np.unique(sources * len(names) + ends, return_index=True)[1]] = False
        twice = {int(entries[at]): (names[sources[at]], names[ends[at]]) for at in np.flatnonzero(doubled)}
        found[sources, ends], again[sources, ends] = entries, -1
    np.fill_diagonal(found, -1)
    np.fill_diagonal(again, -1)
    places = np.flatnonzero(again >= 0)
    for entry, at in zip(*np.unique(again.flat[places], return_index=True), strict=True):
        row, column = divmod(places[at], len(names))
        twice[int(entry)] = names[row], names[column]
    return found, twice


def seconds_on(machines: Sequence[str], pieces: Iterable[Piece], members: Members) -> npt.NDArray[np.float64]:
    """(n, M) seconds of each piece on each machine; infinite where nothing is said.

    A machine's own count, and of its groups those of the smallest.
    """
    number = {name: place for place, name in enumerate(machines)}
    of_group = {name: [number[each] for each in own if each in number] for name, own in members.items()}
    found = np.array([[piece.seconds.get(name, math.nan) for name in machines] for piece in pieces], dtype=np.float64)
    if of_group:
        for row, piece in zip(found, pieces, strict=True):
            for name in sorted(piece.seconds.keys() & of_group.keys(), key=lambda each: len(of_group[each])):
                row[of_group[name]] = np.where(np.isnan(row[of_group[name]]), piece.seconds[name], row[of_group[name]])
    return np.where(np.isnan(found), math.inf, found)


def equal_groups(names: Iterable[str], members: Members) -> Iterator[tuple[str, str, str]]:
    """Groups among ``names`` of as many machines that have one in common, with that: none counts before the other.

    Neither does that machine itself, or a smaller group of it, which would count before both.
    """
    own = {name: [each for each in members[name] if each != CLIENT] for name in names if name in members}
    first = {name: name for name in names if name not in members}
    for name in sorted(own, key=lambda each: len(own[each])):
        for machine in own[name]:
            other = first.setdefault(machine, name)
            if other != name and other != machine and len(own[other]) == len(own[name]):
                yield other, name, machine
                break
