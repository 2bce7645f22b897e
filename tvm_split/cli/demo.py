"""``tvm-split demo``: run all steps, from training to a pipeline of three processes, in less than two minutes."""

from importlib.util import find_spec
from pathlib import Path

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.display.console import print_json
from tvm_split.progress import step_progress

NEEDED_PACKAGES = ("torch", "sklearn")


def demo(
    output: Path = options.output(
        Path("demo-output"), "Where the bundle, the IR and the timeline go.", flag="--output -o"
    ),
    workers: int = option(3, "Worker processes that the network is split over.", minimum=1, max=4),
    shard: bool = option(False, "Let all workers compute each layer together, by rows and by channels."),
    kill: bool = option(False, "Kill a worker in the middle of a stream, and show that no result is lost."),
    json: bool = options.JSON,
) -> None:
    """Train a small network on real handwritten digits, split it over worker processes, and show what happens.

    It shows each machine's program with what it receives and sends, what was compiled, the accuracy before and after
    the split, and a timeline in which the machines compute different micro-batches at the same time, or, with --shard,
    parts of the same one.
    """
    missing = [name for name in NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise TvmSplitError(f"the demonstration needs {', '.join(missing)}: pip install 'tvm-split[demo]'")
    output.mkdir(exist_ok=True)
    from tvm_split.demo.demonstration import demonstrate
    from tvm_split.display.demo import content_of, print_report, write_files

    with step_progress("starting") as report:
        demonstration = demonstrate(workers, output, report, shard=shard, kill=kill)
    write_files(demonstration, output)
    if json:
        print_json(content_of(demonstration, output))
    else:
        print_report(demonstration, output)
