"""The cores that several machines, or machines and the client, share, as a value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from tvm_split.errors import ClusterError
from tvm_split.parameters import fit_fields
from tvm_split.units import ShownFields

MOST_CORES = 8192
"""The most CPUs that a Linux kernel can be configured for: a larger number is a mistake, for example bytes."""
Cores = Annotated[int, Field(ge=1, le=MOST_CORES, strict=True)]


@dataclass(frozen=True, repr=False)
class SharedCores(ShownFields):
    """A number of ``cores`` on which all these machines compute; ``"client"`` may be among them.

    The machines' busy times add up on these cores: while one machine computes, another may have to wait.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    machines: Annotated[tuple[str, ...], Field(min_length=1)]
    cores: Cores

    def __post_init__(self) -> None:
        fit_fields(self, ClusterError)

    def oversubscription(self, cores_of: Mapping[str, int]) -> float:
        """Return the sum of the machines' own core counts, divided by the cores that they share.

        Below 1 some cores stay free; above 1 the cores are oversubscribed, and machines wait for each other.
        """
        return sum(cores_of.get(name, 0) for name in self.machines) / self.cores
