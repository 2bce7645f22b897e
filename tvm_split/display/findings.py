"""What `tvm-split doctor` finds, shown as a row for each check, with the remedy where there is one."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

from rich.text import Text

from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.units import NAME_LETTERS, Shown, clipped, count_text


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of a check of a machine: what was found and, unless it is ok, what that means and what to do."""

    machine: str
    check: str
    level: Level
    found: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class Findings(Shown):
    """Findings in the order of their machines."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is a problem; warnings do not count as problems."""
        return not any(finding.level is Level.PROBLEM for finding in self.findings)


COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
TEXT_LETTERS = 400
"""Texts may be a worker's, and of any length."""


@view.register
def view_of_findings(value: Findings, *, details: bool = False) -> View:
    """Return a table with a section for each machine."""
    rows: list[Row] = []
    for machine, findings in groupby(value.findings, key=lambda finding: finding.machine):
        rows += [()] if rows else []
        rows += [_row(clipped(machine, NAME_LETTERS) * (not place), one) for place, one in enumerate(findings)]
    counts = Counter(finding.level for finding in value.findings if finding.level is not Level.OK)
    title = ", ".join(count_text(count, level) for level, count in sorted(counts.items())) or "no problem"
    return [Table(title, ("machine", "check", "level", "found"), (), rows)]


@as_json.register
def findings_as_json(value: Findings) -> dict[str, Any]:
    return {"ok": value.ok, "findings": [vars(finding) for finding in value.findings]}


def _row(machine: str, finding: Finding) -> Row:
    remedy = f"→ {finding.remedy}" if finding.remedy else ""
    texts = [clipped(text, TEXT_LETTERS) for text in (finding.found, finding.meaning, remedy) if text]
    return machine, clipped(finding.check, NAME_LETTERS), Text(finding.level, COLOURS[finding.level]), "\n".join(texts)
