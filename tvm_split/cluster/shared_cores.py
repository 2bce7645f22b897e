"""Cores that machines share, as values."""

from __future__ import annotations

from dataclasses import dataclass

MOST_CORES = 8192
"""As many as Linux can be built for: what is larger is no number of cores, but of bytes, say."""


@dataclass(frozen=True)
class SharedCores:
    """So many ``cores`` on which all these machines compute; ``"client"`` may be among them.

    Together they cannot be busy for longer than the cores are: while one computes, another may have to wait.
    """

    machines: tuple[str, ...]
    cores: int
