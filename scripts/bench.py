"""Run the benchmarks of this project: measure sides in turn, on request also in other checkouts.

Without a name, list the cases. A case measures several subjects; words after the name choose the subjects that contain
one of them. The exit code is 1 if a subject failed or, with ``--check``, if one exceeds a limit of its case.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.cases import CASES, case_named
from scripts.harness import Options, Report, run


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, help="without one: all cases, with what each measures")
    parser.add_argument("only", nargs="*", help="only subjects that contain one of these words")
    parser.add_argument("--rounds", type=int, help="by default the case's own number")
    parser.add_argument("--also", nargs="*", default=[], metavar="PYTHON", help="interpreters of other checkouts")
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="begin nothing later")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="values of a case's own")
    parser.add_argument("--json", type=Path, help="write the results into this file")
    arguments = parser.parse_args(words)
    console = Console(width=max(140, Console().width))
    if arguments.case is None:
        table = Table("case", "what it measures", show_lines=True)
        for name in CASES:
            table.add_row(name, getdoc(import_module(f"scripts.cases.{name}")))
        console.print(table)
        return 0
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} measures nothing; give at least 1")
    case = case_named(arguments.case)
    missing = [need for need in case.needs if (os.geteuid() if need == "root" else find_spec(need) is None)]
    if missing:
        parser.error(f"{arguments.case} needs {', '.join(missing)}")
    values = dict(setting.split("=", 1) for setting in arguments.set)
    options = Options(arguments.rounds, tuple(arguments.only), tuple(arguments.also), arguments.time_limit, values)

    def keep(report: Report) -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n")

    report = run(arguments.case, case, options, console, keep)
    keep(report)
    for title, texts in (
        ("failed", [f"{subject}: {error}" for subject, error in report.failed.items()]),
        ("no time left for", report.not_reached),
        ("over its limit", report.over_limit),
    ):
        for text in texts:
            console.print(f"{title}: {text}", markup=False, highlight=False)
    return 1 if report.failed or (arguments.check and report.over_limit) or not report.subjects else 0


if __name__ == "__main__":
    sys.exit(main())
