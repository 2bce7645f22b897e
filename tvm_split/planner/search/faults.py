"""What is wrong with a problem before anything is searched: unknown and doubled names, numbers that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.shared_cores import MOST_CORES
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Piece, Problem, ProblemLink
from tvm_split.units import LEAST_AMOUNT, MOST_AMOUNT, SLOWEST, short_list


@dataclass(frozen=True)
class Fault:
    """What is wrong, and where: the location is a path in the problem file, such as ``("links", 2, "from")``."""

    location: tuple[str | int, ...]
    text: str


def require_sense(problem: Problem) -> None:
    """Raise a `PlanError` that says the first that is wrong with a problem, if anything is."""
    found = next(faults(problem), None)
    if found is not None:
        raise PlanError(found.text)


def faults(problem: Problem) -> Iterator[Fault]:
    """Everything that makes a problem meaningless, in the order of the file."""
    machines = {machine.name for machine in problem.machines}
    pieces = {piece.name for piece in problem.pieces}
    if not problem.machines:
        yield Fault(("machines",), "there are no machines; name at least one")
    if not problem.pieces:
        yield Fault(("pieces",), "there are no pieces; name at least one")
    yield from _machine_faults(problem)
    yield from _link_faults(problem, machines)
    yield from _piece_faults(problem, machines)
    yield from _edge_faults(problem, pieces)
    for index, pin in enumerate(problem.pins):
        if pin.piece not in pieces:
            yield Fault(("pins", index, "piece"), _unknown("piece", pin.piece, pieces))
        if pin.machine not in machines:
            yield Fault(
                ("pins", index, "not_on" if pin.forbidden else "on"), _unknown("machine", pin.machine, machines)
            )
    yield from _cores_faults(problem, machines)
    yield from _limit_faults(problem)


def _machine_faults(problem: Problem) -> Iterator[Fault]:
    yield from _doubled("machine", "machines", [machine.name for machine in problem.machines])
    for index, machine in enumerate(problem.machines):
        where = ("machines", index)
        for key in ("memory_bytes", "transfer_seconds", "transfer_seconds_per_byte"):
            yield from _no_amount(getattr(machine, key), (*where, key), f"machine {machine.name!r}")
        yield from _no_amount(
            machine.transfer_seconds_alone, (*where, "alone_transfer_seconds"), f"machine {machine.name!r}"
        )
        if not 0 <= machine.cores <= MOST_CORES:
            text = f"machine {machine.name!r}: cores is {machine.cores}; it must be 0 or more, and at most {MOST_CORES}"
            yield Fault((*where, "cores"), text)
        for key in ("contention", "alone_contention"):
            value = getattr(machine, key)
            if not LEAST_AMOUNT <= value <= MOST_AMOUNT:
                text = f"{key} is {value}; it must be {LEAST_AMOUNT:g} to {MOST_AMOUNT:g}, and 1 is none"
                yield Fault((*where, key), f"machine {machine.name!r}: {text}")


def _link_faults(problem: Problem, machines: set[str]) -> Iterator[Fault]:
    known = {*machines, CLIENT}
    first: dict[tuple[str, str], int] = {}
    # There may be a million links, of which hardly one is wrong.
    for index, link in enumerate(problem.links):
        ends = link.source, link.destination
        is_known = link.source in known and link.destination in known and link.source != link.destination
        is_right = is_known and _is_speed(link.bytes_per_second) and 0 <= link.latency_seconds <= MOST_AMOUNT
        if first.setdefault(ends, index) != index or not is_right:
            yield from _faults_of_link(index, link, known, is_twice=first[ends] != index)


def _faults_of_link(index: int, link: ProblemLink, known: set[str], *, is_twice: bool) -> Iterator[Fault]:
    where, what = ("links", index), f"link from {link.source!r} to {link.destination!r}"
    for key, name in (("from", link.source), ("to", link.destination)):
        if name not in known:
            yield Fault((*where, key), _unknown("machine", name, known - {CLIENT}))
    if link.source == link.destination:
        yield Fault((*where, "to"), f"{what} goes to itself")
    elif is_twice:
        yield Fault(where, f"{what} is there twice; give it once")
    if not _is_speed(link.bytes_per_second):
        limit = f"at most {MOST_AMOUNT:g}" if link.bytes_per_second > 1 else f"above 0, and at least {SLOWEST:g}"
        text = f"{what}: bytes_per_second is {link.bytes_per_second}; it must be {limit}"
        yield Fault((*where, "bytes_per_second"), text)
    yield from _no_amount(link.latency_seconds, (*where, "latency_seconds"), what)


def _is_speed(bytes_per_second: float) -> bool:
    return SLOWEST <= bytes_per_second <= MOST_AMOUNT or bytes_per_second == math.inf


def _piece_faults(problem: Problem, machines: set[str]) -> Iterator[Fault]:
    yield from _doubled("piece", "pieces", [piece.name for piece in problem.pieces])
    for index, piece in enumerate(problem.pieces):
        where, what = ("pieces", index), f"piece {piece.name!r}"
        yield from _seconds_faults(index, piece, machines)
        for key in ("weight_bytes", "activation_bytes"):
            yield from _no_amount(getattr(piece, key), (*where, key), what)


def _seconds_faults(index: int, piece: Piece, known: set[str]) -> Iterator[Fault]:
    for name, seconds in piece.seconds.items():
        where = ("pieces", index, "seconds", name)
        if name not in known:
            yield Fault(where, f"piece {piece.name!r}: {_unknown('machine', name, known)}")
        if 0 < seconds < LEAST_AMOUNT:
            text = f"piece {piece.name!r} on {name!r}: seconds is {seconds}; it must be 0, or at least {LEAST_AMOUNT:g}"
            yield Fault(where, text)
        elif not 0 <= seconds <= MOST_AMOUNT:
            yield from _no_amount(seconds, where, f"piece {piece.name!r} on {name!r}", "seconds")


def _edge_faults(problem: Problem, pieces: set[str]) -> Iterator[Fault]:
    bytes_of: dict[tuple[str, str], float] = {}
    for index, edge in enumerate(problem.edges):
        where, what = ("edges", index), f"edge from {edge.source!r} to {edge.destination!r}"
        for key, name in (("from", edge.source), ("to", edge.destination)):
            if name not in pieces and name != CLIENT:
                yield Fault((*where, key), _unknown("piece", name, pieces))
        if edge.source == edge.destination:
            yield Fault((*where, "to"), f"{what} goes to itself")
        yield from _no_amount(edge.bytes, (*where, "bytes"), what)
        if edge.tensor is not None:
            known = bytes_of.setdefault((edge.source, edge.tensor), edge.bytes)
            if known != edge.bytes:
                text = f"{what}: tensor {edge.tensor!r} has {edge.bytes:g} bytes here and {known:g} on an edge before"
                yield Fault((*where, "bytes"), text)


def _cores_faults(problem: Problem, machines: set[str]) -> Iterator[Fault]:
    known = {*machines, CLIENT}
    for key in ("client_transfer_seconds", "client_transfer_seconds_per_byte"):
        yield from _no_amount(getattr(problem, key), (key,), "the problem")
    for index, shared in enumerate(problem.shared_cores):
        where = ("shared_cores", index)
        for place, name in enumerate(shared.machines):
            if name not in known:
                yield Fault((*where, "machines", place), _unknown("machine", name, known - {CLIENT}))
            if name in shared.machines[:place]:
                yield Fault((*where, "machines", place), f"{name!r} is there twice; give it once")
        if not 1 <= shared.cores <= MOST_CORES:
            text = f"{shared.cores} cores are shared; give 1 or more, and at most {MOST_CORES}"
            yield Fault((*where, "cores"), text)


def _limit_faults(problem: Problem) -> Iterator[Fault]:
    for key in ("maximum_period_seconds", "maximum_latency_seconds"):
        yield from _no_amount(getattr(problem, key), (key,), "the problem")
    yield from _no_amount(problem.buffers, ("buffers",), "the problem")
    for key in ("maximum_machines", "stages"):
        count = getattr(problem, key)
        if count is not None and count < 1:
            yield Fault((key,), f"{key} is {count}; it must be 1 or more")
    stages = problem.stages
    if stages is None:
        return
    most = problem.maximum_machines
    for limit, text in (
        (len(problem.machines), f"there are {len(problem.machines)} machines, and each holds one stage"),
        (len(problem.pieces), f"there are {len(problem.pieces)} pieces, and a stage holds at least one"),
        (stages if most is None else most, f"at most {most} machines may be used, and each holds one stage"),
    ):
        if stages > limit:
            yield Fault(("stages",), f"{stages} stages were asked for, but {text}; ask for fewer")


def _no_amount(value: float, location: tuple[str | int, ...], what: str, key: str | None = None) -> Iterator[Fault]:
    """Where seconds, bytes or the like are below 0, or beyond all that adds up; infinite is what has no limit."""
    if not value >= 0:
        yield Fault(location, f"{what}: {key or location[-1]} is {value}; it must be 0 or more")
    elif MOST_AMOUNT < value < math.inf:
        yield Fault(location, f"{what}: {key or location[-1]} is too large; it must be at most {MOST_AMOUNT:g}")


def _doubled(kind: str, key: str, names: Sequence[str]) -> Iterator[Fault]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if not name:
            yield Fault((key, index, "name"), f"a {kind} has no name")
        if name == CLIENT:
            yield Fault((key, index, "name"), f"a {kind} cannot be named {CLIENT!r}, which stands for the caller")
        if first.setdefault(name, index) != index:
            yield Fault((key, index, "name"), f"two {kind}s are named {name!r}; names must be distinct")


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    return f"no {kind} is named {name!r}; there are {short_list(sorted(known), 8)}"
