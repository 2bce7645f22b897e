"""Which of several reports is the root cause."""

from __future__ import annotations

from rpc_runtime.watch import LINK_GRACE_SECONDS, Report, ReportKind, root_cause

LINK = Report(ReportKind.LINK, "a", "broken", "b")
GONE = Report(ReportKind.GONE, "b", "gone")
STAGE = Report(ReportKind.STAGE, "c", "raised")


def test_a_broken_link_waits_for_a_better_reason() -> None:
    assert root_cause([], 0) is None
    assert root_cause([LINK], LINK_GRACE_SECONDS / 2) is None
    assert root_cause([LINK, GONE], 0) is GONE
    assert root_cause([LINK, GONE, STAGE], 0) is STAGE
    assert root_cause([LINK], LINK_GRACE_SECONDS) is LINK
