"""Where each operation of a graph shall run, as the passes need to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class PlacedStage:
    """A stage's name and the machine that runs it, or the machines that take turns.

    Of several machines ``replicas`` names all, ``machine`` the first, and micro-batch ``s`` is computed by the one with
    the number ``turns[s % len(turns)]``. Graphs show a stage on its first machine.
    """

    name: str
    machine: str
    replicas: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()

    @property
    def machines(self) -> tuple[str, ...]:
        return self.replicas or (self.machine,)


@dataclass(frozen=True)
class Placement:
    """Stages in topological order, the target of every machine, and the stage of every variable.

    ``stage_of`` maps the name hint of each variable that the graph binds to an index into ``stages``.
    """

    stages: tuple[PlacedStage, ...]
    targets: Mapping[str, tvm.target.Target]
    stage_of: Mapping[str, int]
