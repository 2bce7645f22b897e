"""Which axes of a model's inputs and outputs are the rows of a batch, if these do not mix."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Which inputs have the rows of a batch, along their first axis, and each output's axis of them.

    ``mixed`` says why the rows are not independent, or are not known to be; empty if they are.
    """

    inputs: tuple[bool, ...] = ()
    outputs: tuple[int, ...] = ()
    mixed: str = "the bundle does not say that they are independent; compile the model again"
