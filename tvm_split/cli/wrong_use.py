"""A command line that cannot be meant, said in one line like every other error."""

from __future__ import annotations

from tvm_split.rpc_runtime.errors import TvmSplitError


class WrongUseError(TvmSplitError, ValueError):
    """What is wrong with an option or argument; ends a command with exit code 2."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(f"{option}: {text}")
