"""Long operations report their progress also without a terminal, unless that is disabled."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import tvm_split
from relay_passes.ir import main_function
from tests.helpers.waiting import eventually
from tests.models.small_onnx_model import small_model
from tvm_split import progress
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import host_target


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


def line_during(capsys, operation):
    """Return a line that is written while an operation waits for it; the first may be about what was before."""
    written = SimpleNamespace(text="")  # a list would be restored after the import, as a network's own

    def two_lines():
        written.text += capsys.readouterr().err
        return written.text.count("\n") > 1

    def wait():
        capsys.readouterr()
        eventually(two_lines, "lines are written")

    operation(wait)
    return written.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (
            lambda report: (report("compiling", 1, 4), progress.show_part("3 of 6 kernels built", 3, 6)),
            "compiling: 3 of 6 kernels built (38% done), ",
        ),
        (lambda report: report("searching", 1, 1), "searching (100% done), "),  # what follows may take long, too
    ],
)
def test_a_step_says_how_far_it_is(capsys, begin, line):
    def works(wait):
        with progress.step_progress("working") as report:
            begin(report)
            wait()

    assert line_during(capsys, works).startswith(line)


def test_an_operation_within_another_is_shown_in_its_place(capsys):
    def works(wait):
        with progress.step_progress("outer") as report:
            report("compiling", 4, 4)
            with progress.step_progress("importing"):
                wait()

    assert line_during(capsys, works).startswith("importing, ")


def test_an_import_is_shown(capsys):
    def imports(wait):
        def network(x):
            wait()
            return x + 1

        tvm_split.load_model(network, (torch.zeros(2),))

    assert line_during(capsys, imports).startswith("importing function, ")


def test_kernels_that_are_done_are_counted(capsys):
    """The tuned kernels are asked for one after another."""

    network = main_function(tvm_split.load_model(small_model().SerializeToString()).module)

    def compiles(wait):
        target = host_target(1)
        tuned = SimpleNamespace(kernel=lambda function, target: wait())
        with progress.step_progress("compiling"):
            StageCompiler(target, tuned).lower(network.with_attr("global_symbol", "main"))

    assert re.match(r"compiling: \d of \d kernels scheduled, ", line_during(capsys, compiles))


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
