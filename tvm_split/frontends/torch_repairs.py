"""What replaces TVM's own import of torch operators, and which operators are refused.

Every operator in ``REPAIRS`` was wrong, missing, or failed in TVM 0.27; a comment where it is defined says how.
``tests/tvm_split/frontends/test_torch_sweep.py`` compares each with torch.
"""

from __future__ import annotations

from tvm_split.frontends import (
    torch_repairs_arithmetic,
    torch_repairs_indexing,
    torch_repairs_layers,
    torch_repairs_reductions,
    torch_repairs_resampling,
)
from tvm_split.frontends.torch_repair_tools import Repair

REPAIRS: dict[str, Repair] = {
    **torch_repairs_arithmetic.REPAIRS,
    **torch_repairs_layers.REPAIRS,
    **torch_repairs_indexing.REPAIRS,
    **torch_repairs_reductions.REPAIRS,
    **torch_repairs_resampling.REPAIRS,
}

_RANDOM = "its result is random; a split network gives the same answer to the same input"
_DYNAMIC = "the shape of its result depends on the values of its input"

REFUSED: dict[str, str] = {
    # TVM's importer computes the random ones once, or leaves them out, without a word.
    **dict.fromkeys(
        (
            "randn.default",
            "randn_like.default",
            "rand.default",
            "rand_like.default",
            "randint.low",
            "randint_like.default",
            "randperm.default",
            "bernoulli.p",
            "bernoulli.default",
            "exponential.default",
            "normal.Tensor_float",
            "multinomial.default",
            "native_dropout.default",
            "dropout.default",
        ),
        _RANDOM,
    ),
    **dict.fromkeys(("masked_select.default", "nonzero.default", "unique_dim.default", "_unique2.default"), _DYNAMIC),
    "cond": "it chooses what to compute while it runs",
    "while_loop": "it loops while it runs",
}
"""Operator name to the reason."""
