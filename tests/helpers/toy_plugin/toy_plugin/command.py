"""A command that greets."""

from rpc_runtime.option import option
from tvm_split.cli.application import RUN, Command

COMMAND = Command("toy-greet", RUN, "Greet someone.", "toy_plugin.command")


def toy_greet(name: str = option("world", "Whom to greet.")) -> None:
    """Greet someone."""
    print(f"Hello, {name}!")
