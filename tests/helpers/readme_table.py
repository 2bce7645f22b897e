"""The table of README's first page: the source, the machines, and one line for each."""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import tvm_split
from tvm_split.cli.application import app

README = Path(__file__).parents[2] / "README.md"


def lines() -> dict[str, str]:
    """Return the lines, by the text in the table's second column."""
    (table,) = re.findall(r"## From what, to where\n(.*?)\n## ", README.read_text(), re.DOTALL)
    rows = re.findall(r"^\|(?: from | to | )\| (.+?) \| `(.+)` \|$", table, re.MULTILINE)
    assert len(rows) == len(dict(rows)) == table.count("\n|") - 2, "a row that cannot be read, or is there twice"
    return dict(rows)


def run(what: str, **names: Any) -> Any:
    """Run the line of ``what`` in this folder; return a command's output, or the value of a line of Python.

    ``names`` are the variables of the line of Python. They also replace words of a command, such as its fictitious
    addresses.
    """
    line = lines()[what]
    with _nothing_from_libraries():
        if line.startswith("tvm-split "):
            words = [names.get(word, word) for word in shlex.split(line)[1:]]
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert result.exit_code == 0, f"{line}\n{result.output}"
            return result.stdout
        namespace = {"tvm_split": tvm_split, **names}
        exec(line, namespace)
        return namespace[line.partition(" ")[0]]


@contextmanager
def _nothing_from_libraries() -> Iterator[None]:
    """Fail if anything is written to descriptor 2, which no Python code in a test uses."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        written.seek(0)
        assert written.read().decode(errors="replace") == ""
