"""``tvm-split up``, ``down`` and ``worker-kit``: bring workers to machines, over ssh or as a folder or tar file."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.source import load_tvm
from tvm_split.display.console import print_json, print_line, print_note
from tvm_split.display.view import write
from tvm_split.progress import step_progress
from tvm_split.ssh.ssh_cluster import SshCluster, stop_workers
from tvm_split.worker_kit.distributions import Platform
from tvm_split.worker_kit.kit import write_kit

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A cluster file whose machines say how ssh reaches them.", exists=True, dir_okay=False
    ),
]


def up(
    file: FileArgument,
    detach: bool = option(False, "Return when all answer; `tvm-split down` ends them."),
) -> None:
    """Copy, install and start a worker on each machine that has ssh:, and show their logs until Ctrl-C ends all.

    Workers that run already are checked, and left as they are.

    Example: tvm-split up lab.yaml
    """
    load_tvm()
    from tvm_split.compiler.machine_targets import require_fit, require_known_targets

    cluster = tvm_split.Cluster.from_yaml(file)
    require_known_targets(cluster)
    with SshCluster(cluster, require_fit, lambda machine, text: print_line(f"{machine}: {text}"), detach) as session:
        if detach or not session.started:
            print_note(f"all workers run; `tvm-split down {file}` ends them")
            return
        print_note(f"all answer; Ctrl-C ends {', '.join(worker.machine.name for worker in session.started)}")
        session.wait()


def down(
    file: FileArgument,
    remove: bool = option(False, "Remove what was installed there, and the cache, as well."),
    json: bool = options.JSON,
) -> None:
    """End the workers that `tvm-split up` started on the machines of a cluster file.

    Example: tvm-split down lab.yaml
    """
    ended = stop_workers(tvm_split.Cluster.from_yaml(file), remove)
    if json:
        print_json({"ended": ended})
        return
    for machine, process in sorted(ended.items()):
        print_line(f"{machine}: " + (f"ended (process {process} there)" if process else "no worker ran"))


def worker_kit(
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="A new folder, or a file that ends with .tar, .tar.gz or .tar.xz.",
            callback=options.require_parent,
        ),
    ],
    device: Literal["cpu", "cuda"] = option("cpu", "What the worker computes on."),
    architecture: Literal["x86_64", "aarch64"] | None = option(None, "The processor there (default: as here)."),
    python: Literal["3.11", "3.12", "3.13"] | None = option(None, "The Python there (default: as this one)."),
    json: bool = options.JSON,
) -> None:
    """Pack a worker for a machine without internet, on which nothing but a Python is installed.

    Example: tvm-split worker-kit worker.tar.gz --architecture aarch64
    """
    version = sys.version_info[:2] if python is None else (3, int(python[2:]))
    made_for = Platform(version, architecture or platform.machine())
    with step_progress("packing a worker") as report:
        kit = write_kit(output, device, made_for, report)
    write(kit, json=json)
    if not json:
        note = (
            f"there, without internet: python3 {kit.folder} --listen HOST:PORT, with the options of `tvm-split worker`"
        )
        print_note(note)
