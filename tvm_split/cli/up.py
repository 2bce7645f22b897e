"""``tvm-split up`` and ``down``: start and end workers on the machines of a cluster file, over ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.display.console import print_json, print_line, print_note
from tvm_split.ssh.ssh_cluster import SshCluster, stop_workers

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
    from tvm_split.compiler.machine_targets import require_fit, require_known_targets  # loads TVM

    cluster = tvm_split.Cluster.from_yaml(file)
    require_known_targets(cluster)
    with SshCluster(cluster, require_fit, lambda machine, text: print_line(f"{machine}: {text}"), detach) as started:
        if detach or not started.started:
            print_note(f"`tvm-split down {file}` ends them")
            return
        print_note(f"all answer; Ctrl-C ends {', '.join(worker.machine.name for worker in started.started)}")
        started.wait()


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
