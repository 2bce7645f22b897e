"""The table of README's first page: from what, to where, and the one line for each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import tvm_split
from tvm_split.cli.application import app

README = Path(__file__).parents[2] / "README.md"


def lines() -> dict[str, str]:
    """What is in the second column, and its line."""
    (table,) = re.findall(r"## From what, to where\n(.*?)\n## ", README.read_text(), re.DOTALL)
    rows = re.findall(r"^\|(?: from | to | )\| (.+?) \| `(.+)` \|$", table, re.MULTILINE)
    assert len(rows) == len(dict(rows)) == table.count("\n|") - 2, "a row that cannot be read, or is there twice"
    return dict(rows)


def run(what: str, **names: Any) -> Any:
    """Run the line of ``what`` in this folder: a command's output, or what the line of Python makes.

    ``names`` are what Python knows; a word of a command that is one of them is replaced: addresses are made up.
    """
    line = lines()[what]
    if line.startswith("tvm-split "):
        words = [names.get(word, word) for word in shlex.split(line)[1:]]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        return result.stdout
    namespace = {"tvm_split": tvm_split, **names}
    exec(line, namespace)
    return namespace[line.partition(" ")[0]]
