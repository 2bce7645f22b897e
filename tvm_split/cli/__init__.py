"""The command line: ``tvm-split COMMAND``, one file per command.

Commands load what they need when they run, so that ``tvm-split --help`` and ``tvm-split worker`` start at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the command of this process's arguments; see ``tvm_split_command``, where the console script begins."""
    from tvm_split.cli.application import run_application

    run_application()
