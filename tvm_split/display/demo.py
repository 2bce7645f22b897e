"""Print the demonstration's report and write its files."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from rpc_runtime.hardware import own_cores
from tvm_split import values
from tvm_split.demo.demonstration import MICRO_BATCH, SHOWN_MICRO_BATCHES, STREAMED, Demonstration
from tvm_split.display.console import STDOUT
from tvm_split.display.report import statistics_table
from tvm_split.display.view import as_json, print_parts, show
from tvm_split.outputs import write_text
from tvm_split.pictures.timeline import columns_in, draw_picture, drawn_timeline, machines_computing
from tvm_split.units import seconds_text

COMMENT_COLUMN = 56


def content_of(demo: Demonstration, folder: Path) -> dict[str, Any]:
    """Return all measurements and the paths of the files, for ``report.json``."""
    return {
        "network": demo.bundle.model,
        "test_images": demo.test_images,
        "micro_batch_images": MICRO_BATCH,
        "micro_batches": demo.micro_batches,
        "accuracy_unsplit": demo.accuracy_unsplit,
        "accuracy_split": demo.accuracy_split,
        "largest_difference": demo.largest_difference,
        "pipelined_seconds": demo.ran.pipelined_seconds,
        "one_by_one_seconds": demo.ran.one_by_one_seconds,
        "one_worker_seconds": demo.one_worker_seconds,
        "gain": demo.ran.one_by_one_seconds / demo.ran.pipelined_seconds,
        "machines_computing_at_once": machines_computing(demo.ran.events),
        "recovered": None if demo.recovered is None else {**asdict(demo.recovered), "time": str(demo.recovered.time)},
        "stages": [asdict(statistics) for statistics in demo.ran.statistics],
        "compiled": as_json(demo.bundle)["stages"],
        "timeline": str(folder / "timeline.svg"),
        "files": {
            "bundle": str(folder / "bundle"),
            "ir": str(folder / "bundle" / "ir"),
            "timeline_text": str(folder / "timeline.txt"),
        },
    }


def write_files(demo: Demonstration, folder: Path) -> None:
    """Write the timeline as a picture and as text, and ``report.json``."""
    machines = demo.bundle.program.machines
    title = f"{demo.bundle.model} on {len(machines)} machines: the first {SHOWN_MICRO_BATCHES} micro-batches"
    draw_picture(demo.ran.first_events, machines, title, folder / "timeline.svg")
    write_text(folder / "timeline.txt", drawn_timeline(demo.ran.first_events, machines).plain + "\n")
    values.write(content_of(demo, folder), folder / "report.json")


def print_report(demo: Demonstration, folder: Path) -> None:
    """Print the report, from the IR of each machine to the timeline."""
    machines = demo.bundle.program.machines
    STDOUT.print(Rule("What each machine does"))
    for machine in machines:
        text = f"# {machine}\n{short_form(demo.bundle.ir[machine])}"
        STDOUT.print(Syntax(text, "python", background_color="default", padding=(0, 0, 1, 0), word_wrap=True))
    STDOUT.print(
        "Shortened: every line is one binding of the IR, without attributes and devices. In full:", style="dim"
    )
    STDOUT.print(f"{folder}/bundle/ir", style="dim", soft_wrap=True)
    STDOUT.print(Rule("What was compiled"))
    show(demo.bundle)
    STDOUT.print(Rule("What came out"))
    STDOUT.print(_outcome(demo))
    title = f"{demo.ran.statistics[0].micro_batches} micro-batches in all"
    print_parts([statistics_table(demo.ran.statistics, title)])
    if (event := demo.recovered) is not None:
        STDOUT.print(Rule("When a machine dies"))
        now = ", ".join(f"{stage} on {' and '.join(machines)}" for stage, machines in event.placement.items())
        STDOUT.print(
            f"{event.machine} was killed in a stream of {STREAMED} micro-batches. All results came, once, in order and "
            f"equal to the bit to those before.\nAfter {seconds_text(event.pause_seconds)} others had its stages, and "
            f"{event.replayed} micro-batches were sent again. Now: {now}"
        )
    STDOUT.print(Rule(f"The first {SHOWN_MICRO_BATCHES} micro-batches"))
    columns = columns_in(STDOUT.width, machines)
    STDOUT.print(drawn_timeline(demo.ran.first_events, machines, columns), no_wrap=True, overflow="crop")
    STDOUT.print(Text(_overlap(demo)))
    STDOUT.print(f"As a picture: {folder}/timeline.svg", style="dim", soft_wrap=True)


def short_form(ir: str) -> str:
    """Return a machine's IR with one line for each function and binding, without attributes and devices."""
    return "\n".join(filter(None, (_short(line.strip()) for line in ir.splitlines())))


def _short(line: str) -> str:
    if line.startswith("def "):
        return line.partition(" ->")[0] + ":"
    left, equals, call = line.rpartition(" = R.") if " = R." in line else ("", "", line)
    if not equals and "call_packed" not in line:
        return ""
    call = re.sub(r'(R\.)?call_packed\("tvm_split\.(\w+)", ', r"\2(", re.sub(r'R\.str\(("[^"]*")\)', r"\1", call))
    call = re.sub(r'metadata\["[^"]*"\]\[\d+\]', "constant", re.sub(r", \w+=.*", ")", call)).replace("R.", "")
    name, _, kind = left.partition(": ")
    shape = re.search(r'\(\(([^)]*)\), dtype="(\w+)"', kind)
    text = "    " + (f"{name} = {call} " if equals else call)
    return text if shape is None else f"{text.ljust(COMMENT_COLUMN)}# {shape[2]}[{shape[1]}]"


def _outcome(demo: Demonstration) -> RenderableType:
    per_second = demo.test_images / demo.ran.pipelined_seconds
    one_by_one = demo.test_images / demo.ran.one_by_one_seconds
    one_worker = demo.test_images / demo.one_worker_seconds
    is_faster = demo.one_worker_seconds < demo.ran.pipelined_seconds
    verdict = " One worker is faster here: this network is too small for what sending its tensors costs." * is_faster
    return Text(
        f"{demo.test_images} test images in {demo.micro_batches} micro-batches of {MICRO_BATCH}\n"
        f"accuracy: {demo.accuracy_unsplit:.2%} before the split (torch), {demo.accuracy_split:.2%} after it\n"
        f"largest difference of any score: {demo.largest_difference:.2g}\n"
        f"images a second: {per_second:,.0f} as a pipeline, {one_by_one:,.0f} one micro-batch after the other: "
        f"{per_second / one_by_one:.2f} times as many. One worker with all layers: {one_worker:,.0f}.{verdict}"
    )


def _overlap(demo: Demonstration) -> str:
    computing = machines_computing(demo.ran.events)
    together = sum(share for machines, share in computing.items() if machines > 1)
    alone = demo.ran.one_by_one_seconds / demo.micro_batches
    busy = sum(stage.median_compute_seconds for stage in demo.ran.statistics)
    text = (
        "A number is a micro-batch, and so is a colour; a dot is a machine that does not compute. In a stream of "
        f"{STREAMED} micro-batches, two or more machines computed at once {together:.0%} of the time. A micro-batch by "
        f"itself takes {seconds_text(alone)}, of which machines compute {seconds_text(busy)}; the rest is the way "
        "between processes."
    )
    cores, processes = own_cores().count, len(demo.bundle.program.machines) + 1
    if cores < processes:
        text += f" This host has {cores} cores for {processes} processes, so they also wait for each other."
    return text
