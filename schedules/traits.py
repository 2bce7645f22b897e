"""The properties of a CPU that schedules depend on: the vector width and the number of vector registers."""

from dataclasses import dataclass

from tvm.target import Target
from tvm.target.codegen import target_has_features


@dataclass(frozen=True)
class Traits:
    """The properties of a processor that determine tile sizes.

    A vector register holds ``lanes`` float32 values; there are ``registers`` of them.
    """

    lanes: int
    registers: int


def traits_of(target: Target) -> Traits:
    """Return the traits of a CPU target; unknown processors count as having 16 vector registers of 128 bits."""
    if target_has_features("avx512f", target):
        return Traits(lanes=16, registers=32)
    if target_has_features("avx2", target):
        return Traits(lanes=8, registers=16)
    if target_has_features("neon", target):
        return Traits(lanes=4, registers=32)
    return Traits(lanes=4, registers=16)


def threads_of(target: Target) -> int:
    """Return the number of threads that run a kernel: the target's ``num-cores``, or one if it is not set."""
    return max(1, int(target.attrs.get("num-cores", 1)))


def is_cpu(target: Target) -> bool:
    return str(target.kind.name) in ("llvm", "c")


def vector_width(extent: int, traits: Traits, smallest: int = 2) -> int | None:
    """Return the lanes of a whole or half vector, whichever divides ``extent``; None if neither: LLVM does better."""
    widths = (traits.lanes, traits.lanes // 2)
    return next((width for width in widths if width >= smallest and extent % width == 0), None)


def channel_block(channels: int, traits: Traits) -> int | None:
    """Return the channels of one block in a blocked layout: a whole or half vector; None if neither divides them.

    Half a vector is still worthwhile: MobileNetV2's 24 channels run at half of the peak as 3 x 8, and far below it
    unblocked.
    """
    return vector_width(channels, traits, smallest=4)
