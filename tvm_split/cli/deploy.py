"""``tvm-split deploy``: bring a bundle to its machines ahead of the first run."""

from __future__ import annotations

from typing import Any

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.source import cluster_for, load_tvm
from tvm_split.display.console import STDOUT, new_table, print_json, transfer_progress
from tvm_split.units import bytes_text


def deploy(
    bundle: options.BundleArgument,
    machines: MachineOptions,
    timeout: options.TimeoutOption = 60.0,
    json: options.JsonOption = False,
) -> None:
    """Check the workers, send them what they lack, load the stages once, and unload them again.

    Workers keep what they were sent, by its SHA-256. So a run after this sends nothing and starts at once, and what
    does not fit (versions, memory, a missing GPU) shows here and not later. With workers on this host, which end with
    the command, it is a rehearsal.
    """
    load_tvm()
    loaded = tvm_split.Bundle.load(bundle)
    cluster = cluster_for(loaded, machines)
    sent: dict[str, int] = {}
    with deploy_with_progress(loaded, cluster, timeout, sent) as deployment:
        report = [_machine_report(loaded, name, sent.get(name, 0)) for name in deployment.program.machines]
    if json:
        print_json({"model": loaded.model, "digest": loaded.digest, "machines": report})
    else:
        _print_report(loaded, report)


def deploy_with_progress(
    bundle: tvm_split.Bundle,
    cluster: tvm_split.Cluster,
    timeout_seconds: float,
    sent: dict[str, int] | None = None,
    in_flight: int | None = None,
) -> tvm_split.Deployment:
    """Deploy with a bar per machine on stderr; ``sent`` receives the bytes that each machine was sent."""
    with transfer_progress() as bars:

        def report(machine: str, done: int, total: int) -> None:
            if sent is not None:
                sent[machine] = done
            bars(machine, done, total)

        return tvm_split.deploy(
            bundle, cluster, timeout_seconds=timeout_seconds, on_transfer=report, in_flight=in_flight
        )


def _machine_report(bundle: tvm_split.Bundle, machine: str, sent_bytes: int) -> dict[str, Any]:
    stages = bundle.program.stages_on(machine)
    blobs = {blob.sha256: blob for stage in stages for blob in stage.blobs}
    return {
        "machine": machine,
        "stages": [stage.name for stage in stages],
        "needed_bytes": sum(blob.size_bytes for blob in blobs.values()),
        "sent_bytes": sent_bytes,
    }


def _print_report(bundle: tvm_split.Bundle, report: list[dict[str, Any]]) -> None:
    rows = (
        (each["machine"], ", ".join(each["stages"]), bytes_text(each["needed_bytes"]), bytes_text(each["sent_bytes"]))
        for each in report
    )
    STDOUT.print(new_table(f"{bundle.model} is on its machines", ("machine", "stages"), ("needs", "was sent"), rows))
