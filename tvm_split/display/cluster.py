"""Show a cluster: its machines, what is known of its links, and which transport carries which links."""

from collections.abc import Iterable

from rpc_runtime.transports.transport import TRANSPORTS, transport_named
from tvm_split.cluster.cluster import Cluster
from tvm_split.display.view import Table, View, view
from tvm_split.units import bytes_text, count_text, short_list


@view.register
def view_of_cluster(cluster: Cluster, *, details: bool = False) -> View:
    """Return a table with a row for each machine, and the machines that are left out."""
    rows = [
        (
            machine.name,
            machine.address or cluster.launcher.name,
            " ".join(map(str, machine.target.values())) if machine.target else "as its worker reports",
            str(machine.threads),
            "" if machine.memory_bytes is None else bytes_text(machine.memory_bytes),
        )
        for machine in cluster.machines
    ]
    title = f"{count_text(len(rows), 'machine')}: {short_list(cluster.machine_names)}"
    return [
        Table(title, ("machine", "worker", "target"), ("threads", "memory"), rows),
        *(f"left out: {name}, {reason}" for name, reason in cluster.left_out.items()),
    ]


def transport_lines(links: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each transport with its links, which are given as (source, destination, transport).

    Two directions with the same transport are one entry. Links with an unknown (empty) transport are left out.
    """
    transports = {(source, destination): transport for source, destination, transport in links if transport}
    ends: dict[str, list[str]] = {}
    listed = set()
    for (source, destination), transport in transports.items():
        both_ways = transports.get((destination, source)) == transport
        if not (both_ways and (destination, source) in listed):
            ends.setdefault(transport, []).append(f"{source} {'↔' if both_ways else '→'} {destination}")
            listed.add((source, destination))
    return [f"Links over {_title(name)}: {short_list(pairs)}" for name, pairs in ends.items()]


def _title(transport: str) -> str:
    """Return a transport's title, or its name if the package that adds it is not installed here."""
    return transport_named(transport).title if transport in TRANSPORTS else transport
