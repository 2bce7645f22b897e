"""Faults of planning problems: names that are unknown or repeated, and impossible counts."""

from collections.abc import Iterator, Mapping, Sequence

from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.faults import Fault, link_faults, repeated_names, unknown_name
from tvm_split.errors import PlanError
from tvm_split.placement.problem import Piece, Problem, ProblemMachine


def require_valid(problem: Problem) -> None:
    """Raise a `PlanError` for the first fault of a problem, if there is one."""
    for fault in faults(problem):
        raise PlanError(fault.text)


def faults(problem: Problem) -> Iterator[Fault]:
    """The faults of a problem: names that are unknown or repeated, and impossible counts. Types check the ranges.

    A repeated message is yielded once. If machine or piece names are wrong, references to names are not checked.
    """
    wrong_names = [*_name_faults("machine", problem.machines), *_name_faults("piece", problem.pieces)]
    reported: set[str] = set()
    for fault in wrong_names or _reference_faults(problem):
        if fault.text not in reported:
            reported.add(fault.text)
            yield fault


def _name_faults(what: str, entries: Sequence[ProblemMachine | Piece]) -> Iterator[Fault]:
    if not entries:
        yield Fault((f"{what}s",), f"there are no {what}s; name at least one")
    for index, entry in enumerate(entries):
        if entry.name in ("", CLIENT):
            wrong = f"cannot be named {CLIENT!r}, which stands for the caller" if entry.name else "has no name"
            yield Fault((f"{what}s", index, "name"), f"a {what} {wrong}")
    yield from repeated_names(what, (entry.name for entry in entries))


def _reference_faults(problem: Problem) -> Iterator[Fault]:
    machines, pieces = ({entry.name: None for entry in entries} for entries in (problem.machines, problem.pieces))
    ends = {**machines, CLIENT: None}
    yield from link_faults(((link.source, link.destination) for link in problem.links), ends)
    for index, piece in enumerate(problem.pieces):
        if not piece.seconds.keys() <= machines.keys():
            for name in piece.seconds:
                yield from unknown_name("machine", name, machines, ("pieces", index, "seconds", name))
    yield from _edge_faults(problem, {**pieces, CLIENT: None})
    for index, pin in enumerate(problem.pins):
        yield from unknown_name("piece", pin.piece, pieces, ("pins", index, "piece"))
        where = ("pins", index, "not_on" if pin.forbidden else "on")
        yield from unknown_name("machine", pin.machine, machines, where)
    for index, shared in enumerate(problem.shared_cores):
        for place, name in enumerate(shared.machines):
            where_shared = ("shared_cores", index, "machines", place)
            yield from unknown_name("machine", name, ends, where_shared)
            if name in shared.machines[:place]:
                yield Fault(where_shared, f"shared cores name {name!r} twice; give it once")
    limits = [
        (len(machines), f"there are {len(machines)} machines, and each holds one stage"),
        (len(pieces), f"there are {len(pieces)} pieces, and a stage holds at least one"),
    ]
    if (most := problem.maximum_machines) is not None:
        limits.append((most, f"at most {most} machines may be used, and each holds one stage"))
    limit, text = min(limits)
    if problem.stages is not None and problem.stages > limit:
        yield Fault(("stages",), f"{problem.stages} stages were asked for, but {text}; ask for fewer")


def _edge_faults(problem: Problem, known: Mapping[str, None]) -> Iterator[Fault]:
    bytes_of: dict[tuple[str, str], float] = {}
    for index, edge in enumerate(problem.edges):
        yield from unknown_name("piece", edge.source, known, ("edges", index, "from"))
        yield from unknown_name("piece", edge.destination, known, ("edges", index, "to"))
        what = f"edge from {edge.source!r} to {edge.destination!r}"
        if edge.source == edge.destination:
            yield Fault(("edges", index, "to"), f"{what} goes to itself")
        if edge.tensor is not None and bytes_of.setdefault((edge.source, edge.tensor), edge.bytes) != edge.bytes:
            before = bytes_of[edge.source, edge.tensor]
            text = f"{what}: tensor {edge.tensor!r} has {edge.bytes!r} bytes here and {before!r} on an edge before"
            yield Fault(("edges", index, "bytes"), text)
