import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest

from tests.helpers.waiting import eventually
from tvm_split.errors import ReferenceFailedError
from tvm_split.frontends.reference import Arranged, InChildProcess

X = np.arange(6, dtype="float32").reshape(2, 3)


@dataclass(frozen=True)
class Reference:
    """Twice the input; or what a framework does that cannot run a file."""

    fault: str = ""

    def outputs(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        if self.fault == "process":
            return (np.array(os.getpid()),)
        if self.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "memory":
            return (np.ones(1 << 30),)
        if self.fault == "error":
            raise KeyError("name")
        return tuple(2 * array for array in inputs)

    def values(self, inputs: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        yield "first", inputs[0]
        yield from (("second", output) for output in self.outputs(inputs))


def test_answers_come_from_the_child() -> None:
    reference = InChildProcess(Reference())
    (output,) = reference.outputs([X])
    np.testing.assert_array_equal(output, 2 * X)
    assert [name for name, _ in reference.values([X])] == ["first", "second"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("crash", "SIGSEGV"),
        ("hang", "within 5 s"),
        ("memory", "more memory"),
        ("error", "KeyError"),
    ],
)
def test_what_a_file_makes_a_framework_do_is_an_error_that_says_how_to_go_on(fault: str, message: str) -> None:
    reference = InChildProcess(Reference(fault), timeout_seconds=5, memory_bytes=2 << 30)
    with pytest.raises(ReferenceFailedError, match=rf"{message}.*verify=False"):
        reference.outputs([X])
    (output,) = InChildProcess(Reference()).outputs([X])
    np.testing.assert_array_equal(output, 2 * X)


@dataclass(frozen=True)
class EndsTheIdleChild(Reference):
    """A reference that kills a child process while it is sent to that child."""

    process: int = 0

    def __reduce__(self) -> Any:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        return Reference, ()


def test_an_idle_child_that_is_killed_at_that_moment_is_replaced() -> None:
    (process,) = InChildProcess(Reference("process")).outputs([X])
    (output,) = InChildProcess(EndsTheIdleChild(process=int(process))).outputs([X])
    np.testing.assert_array_equal(output, 2 * X)


def test_an_idle_child_that_ends_leaves_no_zombie() -> None:
    (process,) = InChildProcess(Reference("process")).outputs([X])
    os.kill(int(process), signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(int(process)), "the child is reaped, though no other request comes")


def test_threads_get_their_own_answers() -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda number: InChildProcess(Reference()).outputs([X + number]), range(12))
    for number, (output,) in enumerate(answers):
        np.testing.assert_array_equal(output, 2 * (X + number))


def test_an_iteration_that_ends_early_leaves_nothing_behind() -> None:
    reference = InChildProcess(Reference())
    for name, _ in reference.values([X]):
        assert name == "first"
        break
    assert len(reference.outputs([X, X])) == 2


def test_values_have_their_axes_in_the_order_of_the_variables() -> None:
    values = dict(Arranged(Reference(), {"first": (1, 0), "second": (0, 1)}).values([X]))
    np.testing.assert_array_equal(values["first"], X.T)
    np.testing.assert_array_equal(values["second"], 2 * X)
