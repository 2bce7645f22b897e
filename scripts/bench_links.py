"""One hop, one way, between two worker processes, by each transport; beside what sockets and copying need for it.

Latency is from the sender's having a tensor (the end of its stage, by the trace) to the receiver's beginning with it,
while the sender computes the next one; throughput is that of a stream whose stages do nothing; processor time is that
of both sides for one message, beside a little computing. With `--also`, other checkouts do the same in turns. Then, the
share of a core that a deployment needs which is asked for nothing. Prints medians over rounds and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.partner import Partner, module
from scripts.raw_hops import KINDS, MEMCPY, UNIX
from scripts.rounds import Figures, Rounds, in_turns, medians, ratio, written
from tvm_split.progress import step_progress

SIZES = {1_000: 2, 100_000: 2, 800_000: 2, 16_000_000: 20}
"""Bytes, and how many matrix products a sender computes beside: longer than the transfer, or messages would queue."""
COMPUTING_SECONDS = 0.002
"""Of sockets, which hand a message over before they compute the next one."""


class Checkouts:
    """The workers of this checkout, and of others, by the name of what carries their links."""

    def __init__(self, also: list[str], until_end: contextlib.ExitStack) -> None:
        runner = str(Path(__file__).with_name("hop_of_checkout.py"))
        folder = Path(until_end.enter_context(tempfile.TemporaryDirectory()))  # where no package is found by chance
        self.transports: dict[str, Callable[..., Any]] = {}
        for python in (sys.executable, *also):
            partner = until_end.enter_context(Partner([python, "-P", runner], folder, PYTHONPATH=""))
            about = partner.ask(what="about")
            for transport in about["transports"]:
                name = transport if python == sys.executable else f"{transport}, {about['checkout']}"
                self.transports[name] = partial(partner.ask, transport=transport)


def hops(checkouts: Checkouts, raw: Partner, size_bytes: int, seconds: float, rounds: int) -> Rounds:
    sides: dict[str, Callable[[], Figures]] = {
        name: partial(ask, what="hop", size_bytes=size_bytes, products=SIZES[size_bytes], seconds=seconds)
        for name, ask in checkouts.transports.items()
    }
    for kind in KINDS:
        sides[kind] = partial(
            raw.ask, kind=kind, size_bytes=size_bytes, computing_seconds=COMPUTING_SECONDS, seconds=seconds
        )
    return in_turns(sides, rounds)


def print_hops(console: Console, size_bytes: int, found: Rounds) -> None:
    table = Table(title=f"{size_bytes:,} bytes, one way")
    table.add_column("")
    for heading in ("latency, µs", "of unix socket", "GB/s", "of memcpy", "processor, µs", "of unix socket"):
        table.add_column(heading, justify="right")
    for name, each in medians(found).items():
        table.add_row(
            name,
            f"{each['latency_seconds'] * 1e6:.0f}",
            f"{ratio(found, 'latency_seconds', name, UNIX):.2f}",
            f"{each['bytes_per_second'] * 1e-9:.3f}",
            f"{ratio(found, 'bytes_per_second', name, MEMCPY):.3f}",
            f"{each['processor_seconds'] * 1e6:.0f}",
            f"{ratio(found, 'processor_seconds', name, UNIX):.2f}",
        )
    console.print(table)


def print_idle(console: Console, seconds: float, found: Rounds) -> None:
    table = Table("", "sender", "receiver", "client", title=f"share of a core, idle for {seconds:g} s")
    for name, each in medians(found).items():
        table.add_row(name, *(f"{share:.2%}" for share in each.values()))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="bytes (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each stream (default %(default)s)")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="0: not at all (default %(default)s)")
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        metavar="PYTHON",
        help="interpreters of other checkouts, which are measured too",
    )
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(120, Console().width))
    content: dict[str, Mapping[str, Any]] = {}
    with contextlib.ExitStack() as until_end:
        checkouts = Checkouts(arguments.also, until_end)
        raw = until_end.enter_context(Partner(module("raw_hops"), OPENBLAS_NUM_THREADS="1"))
        for size_bytes in arguments.sizes:
            with step_progress(f"hops of {size_bytes} bytes"):
                found = hops(checkouts, raw, size_bytes, arguments.seconds, arguments.rounds)
            print_hops(console, size_bytes, found)
            content[str(size_bytes)] = {"medians": medians(found), "rounds": found}
        if arguments.idle_seconds:
            sides = {
                name: partial(ask, what="idle", seconds=arguments.idle_seconds)
                for name, ask in checkouts.transports.items()
            }
            found = in_turns(sides, 1)
            print_idle(console, arguments.idle_seconds, found)
            content["idle"] = {"seconds": arguments.idle_seconds, **medians(found)}
    written(arguments.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
