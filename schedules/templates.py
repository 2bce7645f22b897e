"""What can be tuned for a target: its templates, what they know of the machine, and what replaying a record takes."""

from __future__ import annotations

from typing import Any

from tvm.target import Target

from schedules import cpu, gpu
from schedules.gpu.fragments import DTYPES, fragments_of
from schedules.gpu.tile import Gpu, gpu_of
from schedules.template import Template
from schedules.traits import Traits, is_cpu, traits_of


def templates_of(target: Target) -> tuple[Template[Any], ...]:
    """Every family of kernels whose schedule has choices, for targets of kind llvm and cuda."""
    return cpu.TEMPLATES if is_cpu(target) else gpu.TEMPLATES


def machine_of(target: Target) -> Traits | Gpu:
    """What the target's templates take beside a function."""
    return traits_of(target) if is_cpu(target) else gpu_of(target)


def make_instructions_known(target: Target) -> None:
    """A record has the names of a GPU's instructions only: TVM is told what they mean before it is replayed."""
    if not is_cpu(target):
        for dtype in DTYPES:
            fragments_of(dtype)
