"""How operators are lowered for a target, as ``relax.transform.LegalizeOps`` takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import relax
from tvm.relax import BlockBuilder
from tvm.target import Target

from tvm_split.schedules.legalize import gpu_convolution, gpu_matmul
from tvm_split.schedules.legalize.convolution import legalize_conv2d
from tvm_split.schedules.legalize.elementary import ELEMENTARY, legalize_elementary
from tvm_split.schedules.legalize.extremes import legalize_bounds, legalize_extreme
from tvm_split.schedules.legalize.matmul import legalize_matmul
from tvm_split.schedules.legalize.normalization import layer_norm, legalize_groups, legalize_rows, rms_norm
from tvm_split.schedules.legalize.softmax import legalize_softmax
from tvm_split.schedules.traits import is_cpu, traits_of

Legalization = Callable[[BlockBuilder, relax.Call], relax.Expr]


def legalizations(target: Target) -> dict[str, Legalization]:
    """Own lowerings by operator name; operators that are not named keep TVM's."""
    bounds = dict.fromkeys(("relax.clip", "relax.nn.relu", "relax.nn.relu6"), legalize_bounds)
    if str(target.kind.name) == "cuda":
        return {
            **bounds,
            "relax.nn.conv2d": gpu_convolution.legalize_conv2d(target),
            "relax.matmul": gpu_matmul.legalize_matmul(target),
        }
    if not is_cpu(target):
        return {}
    traits = traits_of(target)
    elementary = {name: legalize_elementary(name) for name in ELEMENTARY}
    return {
        **bounds,
        **elementary,
        "relax.nn.conv2d": legalize_conv2d(traits),
        "relax.matmul": legalize_matmul(traits),
        "relax.max": legalize_extreme(largest=True),
        "relax.min": legalize_extreme(largest=False),
        "relax.nn.softmax": legalize_softmax(traits, logarithm=False),
        "relax.nn.log_softmax": legalize_softmax(traits, logarithm=True),
        "relax.nn.layer_norm": partial(legalize_rows, compute=layer_norm, traits=traits),
        "relax.nn.rms_norm": partial(legalize_rows, compute=rms_norm, traits=traits),
        "relax.nn.group_norm": partial(legalize_groups, traits=traits),
        "relax.nn.instance_norm": partial(legalize_groups, traits=traits),
    }
