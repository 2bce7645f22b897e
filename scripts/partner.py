"""A process that takes part in a benchmark: it answers requests, a line of JSON in, a line of JSON out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rpc_runtime.processes import Closing


class Partner(Closing):
    """The process of a command, in ``folder``, with its errors shown here. It raises `SystemExit` when it has ended."""

    def __init__(self, command: Sequence[str], folder: Path | None = None, **environment: str) -> None:
        self._command = list(command)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
        )

    def tell(self, **request: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its missing answer says
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self._command)} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        self.tell(**request)
        return self.answer()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ask_all(partners: Sequence[Partner], **request: Any) -> list[Any]:
    """The same of each, at the same time."""
    for partner in partners:
        partner.tell(**request)
    return [partner.answer() for partner in partners]


def module(name: str, *arguments: str) -> list[str]:
    """The command of a partner that is a module of this folder."""
    return [sys.executable, "-m", f"scripts.{name}", *arguments]


def answer_requests(answer: Callable[..., Any]) -> None:
    """A partner's life: answers what is asked on standard input, until that ends."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
