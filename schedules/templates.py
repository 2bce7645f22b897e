"""For each kind of target: its templates, its machine description, and the setup before a record can be replayed."""

from __future__ import annotations

from typing import Any

from tvm.target import Target

from schedules import cpu, gpu
from schedules.gpu.fragments import DTYPES, fragments_of
from schedules.gpu.tile import Gpu, gpu_of
from schedules.template import Template
from schedules.traits import Traits, is_cpu, traits_of


def templates_of(target: Target) -> tuple[Template[Any], ...]:
    """The templates of a target; targets of kind llvm and cuda have some."""
    return cpu.TEMPLATES if is_cpu(target) else gpu.TEMPLATES


def machine_of(target: Target) -> Traits | Gpu:
    """Return the description of a target's machine, which its templates take besides a function."""
    return traits_of(target) if is_cpu(target) else gpu_of(target)


def make_instructions_known(target: Target) -> None:
    """Register a GPU target's instructions with TVM before a record is replayed; a record holds only their names."""
    if not is_cpu(target):
        for dtype in DTYPES:
            fragments_of(dtype)
