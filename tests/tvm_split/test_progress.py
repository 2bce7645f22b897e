"""Long operations report their progress also without a terminal, unless that is disabled."""

import threading
import time

import pytest

from tests.helpers.waiting import eventually
from tvm_split import progress


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.02)


def takes_a_while(on_progress=None):
    on_progress("lowering", 1, 4)
    time.sleep(0.2)
    return on_progress


def test_lines_where_there_is_no_terminal(capsys):
    output = []

    def takes_until_it_is_said_twice(on_progress=None):
        on_progress("lowering", 1, 4)
        counted = lambda: output.append(capsys.readouterr().err) or "".join(output).count("lowering (25% done), ")  # noqa: E731
        eventually(lambda: counted() >= 2, "two lines are written")

    progress.says_progress("working")(takes_until_it_is_said_twice)()
    eventually(lambda: "progress" not in [thread.name for thread in threading.enumerate()], "the thread has ended")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_it_can_be_turned_off(capsys, monkeypatch):
    monkeypatch.setenv("TVM_SPLIT_PROGRESS", "0")
    progress.says_progress("working")(takes_a_while)()
    assert capsys.readouterr().err == ""


def test_who_asks_for_the_steps_gets_them_instead(capsys):
    steps = []

    def report(*step):
        steps.append(step)

    assert progress.says_progress("working")(takes_a_while)(on_progress=report) is report
    assert steps == [("lowering", 1, 4)]
    assert capsys.readouterr().err == ""
