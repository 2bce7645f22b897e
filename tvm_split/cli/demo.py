"""``tvm-split demo``: run all steps, from training to a pipeline of three processes, in less than two minutes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rpc_runtime.errors import TvmSplitError
from tvm_split.cli import options
from tvm_split.display.console import print_json
from tvm_split.progress import step_progress

NEEDED_PACKAGES = ("torch", "sklearn", "matplotlib")


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the bundle, the IR and the timeline go.")
    ] = Path("demo-output"),
    workers: Annotated[int, typer.Option(min=1, max=4, help="Worker processes that the network is split over.")] = 3,
    shard: Annotated[
        bool, typer.Option("--shard", help="Let all workers compute each layer together, by rows and by channels.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Train a small network on real handwritten digits, split it over worker processes, and show what happens.

    It shows each machine's program with what it receives and sends, what was compiled, the accuracy before and after
    the split, and a timeline in which the machines compute different micro-batches at the same time, or, with --shard,
    parts of the same one.
    """
    missing = [name for name in NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise TvmSplitError(f"the demonstration needs {', '.join(missing)}: pip install 'tvm-split[demo]'")
    output.mkdir(parents=True, exist_ok=True)
    from tvm_split.demo.demonstration import demonstrate
    from tvm_split.display.demo import content_of, print_report, write_files

    with step_progress("starting") as report:
        demonstration = demonstrate(workers, output, report, shard=shard)
    write_files(demonstration, output)
    if json:
        print_json(content_of(demonstration, output))
    else:
        print_report(demonstration, output)
