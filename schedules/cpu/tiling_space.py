"""The tuning space of convolutions and matrix products: `Tiling` as named values, and the values worth trying."""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir, tirx

from schedules.blocks import find_parts, new_schedule
from schedules.cpu.contraction import LoopRoles, Tiling, schedule_contraction
from schedules.cpu.register_tile import RegisterTile, divisors, tiles_to_try
from schedules.template import Choices, Space, Template, Value
from schedules.traits import Traits

ALL_AT_ONCE = "all"
BLOCKS_OUTSIDE = "blocks_outside"
ROWS_OUTSIDE = "rows_outside"
PREPARE_BEFORE = "before"
PREPARE_INSIDE = "inside"

SMALLEST_CHUNK_STEPS = 16
LARGEST_UNROLL = 16

RolesOf = Callable[[tuple[int, ...]], LoopRoles]
TilingOf = Callable[[tuple[int, ...], Traits], Tiling]


def contraction_template(
    name: str, family: str, roles_of: RolesOf, choose_tiling: TilingOf, *, chunks: bool = True
) -> Template[Traits]:
    """A template for kernels with an anchor of ``family``.

    ``roles_of`` and ``choose_tiling`` take the anchor's extents. ``chunks`` says whether its reduction is long enough
    to be split into chunks.
    """

    def space(function: tirx.PrimFunc, traits: Traits) -> Space | None:
        parts = find_parts(new_schedule(function), family)
        if parts is None:
            return None
        extents = parts.anchor.extents
        roles, default = roles_of(extents), choose_tiling(extents, traits)
        return _space(extents, roles, default, traits, chunks=chunks, prepares=bool(parts.preparation))

    def schedule(function: tirx.PrimFunc, traits: Traits, choices: Choices) -> s_tir.Schedule:
        made = new_schedule(function)
        parts = find_parts(made, family)
        if parts is None:
            raise ValueError(f"the function has no single anchor of family {family!r}")
        schedule_contraction(made, parts, roles_of(parts.anchor.extents), tiling_of(choices), traits)
        return made

    return Template(name, space, schedule)


def choices_of(tiling: Tiling) -> dict[str, Value]:
    """A tiling as named values; `Tiling` describes them."""
    return {
        "tile": f"{tiling.tile.rows}x{tiling.tile.blocks}",
        "chunk": ALL_AT_ONCE if tiling.chunk is None else tiling.chunk,
        "group": tiling.group,
        "order": BLOCKS_OUTSIDE if tiling.blocks_outermost else ROWS_OUTSIDE,
        "unroll": tiling.unroll,
        "prepare": PREPARE_INSIDE if tiling.prepare_inside else PREPARE_BEFORE,
    }


def tiling_of(choices: Choices) -> Tiling:
    rows, _, blocks = str(choices["tile"]).partition("x")
    return Tiling(
        tile=RegisterTile(int(rows), int(blocks)),
        chunk=None if choices["chunk"] == ALL_AT_ONCE else int(choices["chunk"]),
        group=int(choices["group"]),
        blocks_outermost=choices["order"] == BLOCKS_OUTSIDE,
        unroll=int(choices["unroll"]),
        prepare_inside=choices["prepare"] == PREPARE_INSIDE,
    )


def _space(
    extents: tuple[int, ...], roles: LoopRoles, default: Tiling, traits: Traits, *, chunks: bool, prepares: bool
) -> Space:
    """The tilings to try for an anchor with these extents; ``default`` is the cost rule's choice."""
    outermost, innermost = extents[roles.reduction[0]], extents[roles.reduction[-1]]
    steps = [step for step in divisors(outermost) if step < outermost] if chunks else []
    if len(roles.reduction) == 1:
        steps = [step for step in steps if step >= SMALLEST_CHUNK_STEPS]
    tiles = [f"{tile.rows}x{tile.blocks}" for tile in tiles_to_try(extents[roles.rows], extents[roles.blocks], traits)]
    # A matrix has no image rows to group: 1 shares its rows among the threads, 0 only its columns.
    groups = divisors(extents[roles.height]) if roles.height is not None else [0, 1]
    values: dict[str, list[Value]] = {
        "tile": list(tiles),
        "chunk": [*steps, ALL_AT_ONCE],
        "group": list(groups),
        "order": [BLOCKS_OUTSIDE, ROWS_OUTSIDE],
        "unroll": [unroll for unroll in divisors(innermost) if unroll <= LARGEST_UNROLL],
        "prepare": [PREPARE_BEFORE, PREPARE_INSIDE] if prepares else [PREPARE_BEFORE],
    }
    chosen = choices_of(default)
    for name, value in chosen.items():
        if value not in values[name]:
            values[name].append(value)
    is_image = roles.height is not None

    def allows(choices: Choices) -> bool:
        if is_image:
            return True
        if choices["group"] == 0:
            return choices["order"] == BLOCKS_OUTSIDE  # the parallel loop has nothing else
        return choices["chunk"] == ALL_AT_ONCE  # the sums of a chunk belong to several tiles of rows

    return Space({name: tuple(each) for name, each in values.items()}, chosen, allows)
