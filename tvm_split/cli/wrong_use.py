"""A command line that cannot be meant, said in one line like every other error."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from tvm_split.rpc_runtime.errors import TvmSplitError


class WrongUseError(TvmSplitError, ValueError):
    """What is wrong with an option or argument; ends a command with exit code 2."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(f"{option}: {text}")


def given_options(context: typer.Context) -> Iterator[tuple[str, str]]:
    """What a command's user wrote: pairs of a parameter's name in Python and on the command line."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            yield name, parameter.opts[0] if parameter.opts[0].startswith("-") else name.upper()
