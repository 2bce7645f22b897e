"""Run the sides of a benchmark in processes of their own, with the packages of this checkout or of another one.

A side is a context manager that yields a `Prepared`. Its process answers requests: a line of JSON in, a line of JSON
out. ``tests`` and ``scripts`` are always those of this checkout. So a side that uses only public names of `tvm_split`
can run with an older checkout as well.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLOSE_SECONDS = 20.0

Facts = Mapping[str, Any]
"""Facts about a side that are reported once, such as its plan; JSON values."""
Figures = Mapping[str, float]
"""Measured numbers by name; a name ends with its unit."""


@dataclass(frozen=True)
class Prepared:
    """A side that is ready: ``measure`` is called with the request's values, ``facts`` go into the report."""

    measure: Callable[..., Figures]
    facts: Facts = field(default_factory=dict)


SideFactory = Callable[..., contextlib.AbstractContextManager[Prepared]]


class SideError(Exception):
    """A side's process has ended, has failed, or did not answer in time."""


@dataclass(frozen=True)
class Checkout:
    """A checkout of this project, with its environment's interpreter; ``label`` is empty for this checkout."""

    label: str
    python: str

    @property
    def is_this(self) -> bool:
        return not self.label

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that imports this checkout's packages."""
        search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return _environment(search_path if self.is_this else "")


def checkouts(also: Sequence[str]) -> tuple[Checkout, ...]:
    """Return this checkout, then those of the given interpreters, labelled by the folders of their packages."""
    other_checkouts = []
    for python in also:
        code = "import pathlib, tvm_split; print(pathlib.Path(tvm_split.__file__).resolve().parents[1].name)"
        with tempfile.TemporaryDirectory() as folder:  # a folder from which no package is imported by accident
            name = subprocess.check_output([python, "-P", "-c", code], cwd=folder, env=_environment(""), text=True)
        other_checkouts.append(Checkout(name.strip(), python))
    return (Checkout("", sys.executable), *other_checkouts)


def _environment(python_path: str) -> dict[str, str]:
    # The user's database of tuned kernels must not be used by default.
    return {**os.environ, "PYTHONPATH": python_path, "TVM_SPLIT_DATABASE": os.devnull}


class SideProcess:
    """The process of one side. `ready` waits until it is prepared, `measure` requests figures, `close` ends it.

    ``seconds`` returns the time limit of one answer; None is no limit.
    """

    def __init__(
        self,
        checkout: Checkout,
        make: SideFactory,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._name = f"{make.__module__}.{make.__name__}"
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory()
        command = [checkout.python, "-P", __file__, make.__module__, make.__name__, json.dumps(arguments)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT if checkout.is_this else self._folder.name,
            env={**checkout.environment(), **environment},
        )

    def ready(self) -> Facts:
        facts: Facts = self.answer()
        return facts

    def measure(self, **request: Any) -> Figures:
        self.ask(**request)
        figures: Figures = self.answer()
        return figures

    def ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; reading its answer will report it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        seconds = self._seconds()
        timer = threading.Timer(max(0.0, seconds or 0.0), self._process.kill)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = self._process.wait()
            raise SideError(f"{self._name} ended with exit code {code} and no answer; see its errors above")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self._name}: {answer['error']}")
        return answer["answer"]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def measure_together(processes: Sequence[SideProcess], **request: Any) -> Figures:
    """Measure with all processes at the same time, and return the sums of their figures."""
    for process in processes:
        process.ask(**request)
    answers = [process.answer() for process in processes]
    keys = dict.fromkeys(key for answer in answers for key in answer)
    return {key: sum(answer.get(key, 0.0) for answer in answers) for key in keys}


def _serve(module: str, factory: str, arguments: str) -> None:
    """Prepare the side, then answer requests on standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that libraries print must not be read as an answer

    def send(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        with getattr(import_module(module), factory)(**json.loads(arguments)) as prepared:
            send({"answer": prepared.facts})
            for line in sys.stdin:
                send({"answer": prepared.measure(**json.loads(line))})
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    for name in ("scripts", "tests"):  # those of this checkout
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(ROOT / name)]
    _serve(*sys.argv[1:])
