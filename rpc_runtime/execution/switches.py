"""What of a worker's environment is on or off: 1 or 0."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tvm_split.rpc_runtime.errors import InputError


@dataclass(frozen=True)
class Switch:
    """A variable, and what holds where it is not set, or empty."""

    variable: str
    default: bool

    @property
    def is_on(self) -> bool:
        """
        Raises:
            InputError: the variable is neither 0 nor 1.
        """
        text = os.environ.get(self.variable, "")
        if text not in ("", "0", "1"):
            raise InputError(f"${self.variable} is 0 or 1, got {text!r}")
        return text == "1" if text else self.default


OVERLAP = Switch("TVM_SPLIT_OVERLAP", True)
"""Whether a GPU's transfers go on while it computes."""
CUDA_GRAPHS = Switch("TVM_SPLIT_CUDA_GRAPHS", False)
"""Whether a GPU's stages are recorded as graphs."""


def require_switches() -> None:
    """Raises an `InputError` where one is neither on nor off."""
    for switch in (OVERLAP, CUDA_GRAPHS):
        _ = switch.is_on
