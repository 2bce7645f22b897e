"""``tvm-split doctor``: is this installation fit for work?"""

from __future__ import annotations

import dataclasses

import typer

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, print_json

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(json: options.JsonOption = False) -> None:
    """Check this installation: packages, compiler, linker, processor, and a tiny program compiled and run."""
    from rich.text import Text

    from tvm_split.cli.checks import Check, Verdict, all_checks

    found: list[Check] = []
    for check in all_checks():
        found.append(check)
        if not json:
            line = Text.assemble((f"{check.verdict:<5}", COLOURS[check.verdict]), f"{check.name}: {check.found}")
            if check.advice:
                line.append(f"\n     → {check.advice}")
            STDOUT.print(line, soft_wrap=True)
    failed = [check.name for check in found if check.verdict is Verdict.FAIL]
    if json:
        print_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]})
    if failed:
        raise typer.Exit(1)
