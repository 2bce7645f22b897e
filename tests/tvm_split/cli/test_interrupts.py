"""Ctrl-C while signal handlers are replaced: either the previous or the next handler gets it."""

import signal
import subprocess
import sys

from tests.helpers.waiting import PATIENCE_SECONDS

AT_A_LINE = """
import signal, sys, threading
from tvm_split.cli.interrupts import ended_by_signals

left = int(sys.argv[1])

def in_function(frame, event, argument):
    return at_line if frame.f_code is ended_by_signals.__wrapped__.__code__ else None

def at_line(frame, event, argument):
    global left
    left -= event == "line"
    if left == 0:
        left = -1
        signal.raise_signal(signal.SIGINT)
    return at_line

signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.settrace(in_function)
with ended_by_signals():
    sys.settrace(None)
    if left > 0:
        sys.exit(0)
    threading.Event().wait(30)
    sys.exit("lost")
"""
BEFORE_A_HANDLER = """
import signal, sys, threading
from tvm_split.cli.interrupts import ended_by_signals

sys.setswitchinterval(100)  # the thread that waits for signals has no turn before this one waits
with ended_by_signals():
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Event().wait(30)
"""


NOBODY_READS = """
import os, signal, sys, threading
from tvm_split.cli.interrupts import ended_by_signals

read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
with ended_by_signals():
    signal.raise_signal(signal.SIGTERM)
    threading.Event().wait(30)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_at_every_line_before_a_command_begins():
    for line in range(1, 100):
        ended = run(AT_A_LINE, str(line))
        if ended.returncode == 0:  # there is no such line
            break
        assert ended.returncode in (130, -signal.SIGINT), f"line {line}: {ended.stderr}"
    assert 8 < line < 99


def test_a_command_that_then_handles_it_itself_does_not_lose_it():
    ended = run(BEFORE_A_HANDLER)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_whose_errors_nobody_reads_ends_as_well() -> None:
    """One signal may end all processes of a pipeline."""
    assert run(NOBODY_READS).returncode == 143
