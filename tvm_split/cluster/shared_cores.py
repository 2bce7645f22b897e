"""Cores that machines share, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

MOST_CORES = 8192
"""As many as Linux can be built for: what is larger is no number of cores, but of bytes, say."""


@dataclass(frozen=True)
class SharedCores:
    """So many ``cores`` on which all these machines compute; ``"client"`` may be among them.

    Together they cannot be busy for longer than the cores are: while one computes, another may have to wait.
    """

    machines: tuple[str, ...]
    cores: Annotated[int, Field(ge=1, le=MOST_CORES)]

    def oversubscription(self, cores_of: Mapping[str, int]) -> float:
        """What all machines together compute on when each does on so many cores, by the cores that there are.

        Below 1 one is left for something else, above 1 they wait for each other.
        """
        return sum(cores_of.get(name, 0) for name in self.machines) / self.cores
