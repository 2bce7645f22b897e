"""``tvm-split dashboard`` and ``report``: a page of what a deployment does, live or of a saved trace."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.source import MachineOptions
from tvm_split.cli.status import asked
from tvm_split.display.console import STDOUT, print_note, print_unwrapped
from tvm_split.display.view import write


def dashboard(
    machines: MachineOptions,
    deployment: str | None = options.DEPLOYMENT,
    listen: str = option(
        "127.0.0.1:8080", "Where the page is (port 0: any free port).", metavar="HOST:PORT", flag="--listen"
    ),
    insecure: bool = option(False, "Let other machines open the page, which needs no token."),
    timeout: float = option(5.0, "The longest wait for a worker.", metavar="SECONDS", minimum=0.1),
) -> None:
    """Serve a page that shows what runs on these workers, until Ctrl-C: machines, links, rates, and what limits.

    The deployment goes on as it is. While none runs, the page waits for the next one.

    Example: tvm-split dashboard --cluster lab.yaml
    """
    asked(machines, timeout)  # so that a wrong location is told at once
    from tvm_split.dashboard.lab import LabPage  # imported here, since they need plotly
    from tvm_split.dashboard.server import page_server

    lab = LabPage(lambda: asked(machines, timeout)[0], deployment)
    with page_server(listen, lab.page, insecure=insecure) as server:
        print_unwrapped(f"the dashboard is at {server.url}")
        STDOUT.file.flush()
        threading.Event().wait()


def report(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.json", help="A saved trace.", exists=True, dir_okay=False)],
    output: Path | None = options.TRACE,
    json: bool = options.JSON,
) -> None:
    """Show what a saved trace says, and write it in another form, such as .html: one file to send to somebody.

    Example: tvm-split report run.json --output run.html
    """
    from tvm_split.observing.trace import Trace  # imported here, since it loads numpy

    saved = Trace.load(trace)
    if output is not None:
        saved.save(output)
        print_note(f"written to {output}")
    write(saved, json=json)
