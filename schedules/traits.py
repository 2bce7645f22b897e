"""What a schedule needs to know about a machine: how wide its vectors are, and how many registers hold them."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target
from tvm.target.codegen import target_has_features

LLVM_KINDS = ("llvm", "c")


@dataclass(frozen=True)
class Traits:
    """A processor, as tile sizes see it.

    ``lanes`` float32 values fit one of ``registers`` vector registers.
    """

    lanes: int
    registers: int


def traits_of(target: Target) -> Traits:
    """The traits of a CPU target; unknown processors count as 128-bit ones with 16 registers."""
    if target_has_features("avx512f", target):
        return Traits(lanes=16, registers=32)
    if target_has_features("avx2", target):
        return Traits(lanes=8, registers=16)
    if target_has_features("neon", target):
        return Traits(lanes=4, registers=32)
    return Traits(lanes=4, registers=16)


def threads_of(target: Target) -> int:
    """How many threads a kernel runs on: the target's ``num-cores``, else one."""
    return max(1, int(target.attrs.get("num-cores", 1)))


def is_cpu(target: Target) -> bool:
    return str(target.kind.name) in LLVM_KINDS


def channel_block(channels: int, traits: Traits) -> int | None:
    """The innermost channel extent of a blocked layout, or None where channels stay unblocked.

    Half a vector is still worth it: MobileNetV2's 24 channels run at half the peak as 3 x 8, unblocked far below.
    """
    for block in (traits.lanes, traits.lanes // 2):
        if block >= 4 and channels % block == 0:
            return block
    return None
