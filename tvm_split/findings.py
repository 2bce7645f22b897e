"""What `tvm-split doctor` finds on a machine."""

from dataclasses import dataclass
from enum import StrEnum

from tvm_split.units import Shown


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
