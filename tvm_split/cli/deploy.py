"""``tvm-split deploy``: send a bundle to its machines before the first run."""

from __future__ import annotations

from dataclasses import dataclass

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.source import cluster_for, read_bundle
from tvm_split.display.console import transfer_progress
from tvm_split.display.view import Table, View, view, write
from tvm_split.units import bytes_text


def deploy(
    bundle: options.BundleArgument,
    machines: MachineOptions,
    rename: options.RenameOption = None,
    timeout: options.TimeoutOption = 60.0,
    json: options.JsonOption = False,
) -> None:
    """Send a bundle's files to its machines, and check that they can run it: load each stage, and unload it again.

    Nothing keeps running. The workers keep the files by their SHA-256, so that `tvm-split run` sends nothing and starts
    at once, and misfits (versions, memory, a missing GPU) are reported here and not later. With workers on this host,
    which end with the command, it is only a check.

    Example: tvm-split deploy bundle --cluster lab.yaml
    """
    loaded = read_bundle(bundle, rename)
    cluster = cluster_for(loaded, machines)
    sent: dict[str, int] = {}
    with deploy_with_progress(loaded, cluster, timeout, sent) as deployment:
        machines_sent = tuple(_blobs_of(loaded, name, sent.get(name, 0)) for name in deployment.program.machines)
    write(DeployedBundle(loaded.model, loaded.digest, machines_sent), json=json)


def deploy_with_progress(
    bundle: tvm_split.Bundle,
    cluster: tvm_split.Cluster,
    timeout_seconds: float,
    sent: dict[str, int] | None = None,
    in_flight: int | None = None,
) -> tvm_split.Deployment:
    """Deploy with a progress bar per machine on stderr; ``sent`` receives the number of bytes sent to each machine."""
    with transfer_progress() as bars:

        def report(machine: str, done: int, total: int) -> None:
            if sent is not None:
                sent[machine] = done
            bars(machine, done, total)

        return tvm_split.deploy(
            bundle, cluster, timeout_seconds=timeout_seconds, on_transfer=report, in_flight=in_flight
        )


@dataclass(frozen=True)
class MachineBlobs:
    """The size of the blobs that a machine needs of a bundle, and of those that were sent to it."""

    machine: str
    stages: tuple[str, ...]
    needed_bytes: int
    sent_bytes: int


def _blobs_of(bundle: tvm_split.Bundle, machine: str, sent_bytes: int) -> MachineBlobs:
    stages = bundle.program.stages_on(machine)
    sizes = {blob.sha256: blob.size_bytes for stage in stages for blob in stage.blobs}
    return MachineBlobs(machine, tuple(stage.name for stage in stages), sum(sizes.values()), sent_bytes)


@dataclass(frozen=True)
class DeployedBundle:
    """A bundle that was sent to its machines."""

    model: str
    digest: str
    machines: tuple[MachineBlobs, ...]


@view.register
def view_of_deployed(deployed: DeployedBundle, *, details: bool = False) -> View:
    """Return a table with a row for each machine."""
    rows = [
        (machine.machine, ", ".join(machine.stages), bytes_text(machine.needed_bytes), bytes_text(machine.sent_bytes))
        for machine in deployed.machines
    ]
    title = f"{deployed.model}: its files are on its machines, which can run it"
    return [Table(title, ("machine", "stages"), ("needs", "was sent"), rows)]
