"""CPU targets: layout passes, lowerings, and the schedule rules in the order they are tried, special ones first."""

from collections.abc import Callable
from functools import partial

import tvm
from tvm import tirx
from tvm.target import Target

from schedules.arithmetic import ARITHMETIC, legalize_arithmetic
from schedules.cpu.blocked_channels import carry_blocked_channels
from schedules.cpu.convolution import CONV2D, DEPTHWISE_CONV2D, legalize_conv2d
from schedules.cpu.elementary import ELEMENTARY, FUNCTIONS, legalize_elementary, legalize_function
from schedules.cpu.elementwise import schedule_elementwise, schedule_fallback, schedule_pooling, schedule_reduction
from schedules.cpu.matmul import MATMUL, PackMatmul, matmul_with_packing
from schedules.cpu.narrow_groups import WidenGroups
from schedules.cpu.normalization import legalize_groups, legalize_rows
from schedules.cpu.one_dimensional import raise_to_two_dimensions
from schedules.cpu.softmax import legalize_softmax, schedule_columns
from schedules.cpu.transposed import ReplaceTransposed
from schedules.cpu.winograd import UseWinograd
from schedules.cpu.winograd_schedule import schedule_winograd
from schedules.extremes import LOWERINGS
from schedules.relax_tools import PLAIN_LAYOUTS, Legalization, default_convolution, legalize_matmul
from schedules.template import Template
from schedules.traits import Traits, threads_of, traits_of

TEMPLATES: tuple[Template[Traits], ...] = (CONV2D, DEPTHWISE_CONV2D, MATMUL)
"""The rules whose schedules have choices; tuning works on these."""

RULES: tuple[tuple[str, Callable[..., tirx.PrimFunc | None]], ...] = (
    *((template.name, template.rule) for template in TEMPLATES),
    ("winograd", schedule_winograd),
    ("columns", schedule_columns),
    ("elementwise", schedule_elementwise),
    ("pooling", schedule_pooling),
    ("reduction", schedule_reduction),
    ("fallback", schedule_fallback),
)


def layout_passes(target: Target) -> tuple[Callable[[tvm.IRModule], tvm.IRModule], ...]:
    """Return the passes from plain to blocked layouts, in order; weights must be constants.

    Run FoldConstant before and after LegalizeOps: it computes the layout changes of the weights.
    """
    traits, threads = traits_of(target), threads_of(target)
    return (
        lambda module: ReplaceTransposed(module, traits).transform(),
        raise_to_two_dimensions,
        lambda module: WidenGroups(module, traits).transform(),
        partial(carry_blocked_channels, traits=traits),
        lambda module: UseWinograd(module, traits, threads).transform(),
        lambda module: PackMatmul(module, traits).transform(),
    )


def legalizations(target: Target) -> dict[str, Legalization]:
    """Return this package's lowerings by operator name; TVM lowers all other operators."""
    of_traits = {
        "relax.nn.conv2d": legalize_conv2d,
        "relax.nn.softmax": legalize_softmax,
        "relax.nn.log_softmax": legalize_softmax,
        "relax.nn.layer_norm": legalize_rows,
        "relax.nn.rms_norm": legalize_rows,
        "relax.nn.group_norm": legalize_groups,
        "relax.nn.instance_norm": legalize_groups,
    }
    return {
        **dict.fromkeys(PLAIN_LAYOUTS, default_convolution),
        **LOWERINGS,
        **dict.fromkeys(ARITHMETIC, legalize_arithmetic),
        **dict.fromkeys(FUNCTIONS, legalize_function),
        **dict.fromkeys(ELEMENTARY, legalize_elementary),
        **{name: partial(legalize, traits=traits_of(target)) for name, legalize in of_traits.items()},
        "relax.matmul": partial(legalize_matmul, compute=partial(matmul_with_packing, traits=traits_of(target))),
    }


def rules(target: Target) -> list[tuple[str, Callable[[tirx.PrimFunc], tirx.PrimFunc | None]]]:
    """Return the target's rules with their names, in the order they are tried; one that does not match returns None."""
    traits = traits_of(target)

    def for_traits(rule: Callable[..., tirx.PrimFunc | None]) -> Callable[[tirx.PrimFunc], tirx.PrimFunc | None]:
        return lambda function: rule(function, traits)

    return [(name, for_traits(rule)) for name, rule in RULES]
