"""Show a cluster: its machines, and what is known of its links."""

from __future__ import annotations

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
