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
from tvm_split.frontends.importing import BRANCH, DYNAMIC, LOOP, RANDOM
from tvm_split.frontends.torch_calls import Repair

REPAIRS: dict[str, Repair] = {
    **torch_repairs_arithmetic.REPAIRS,
    **torch_repairs_layers.REPAIRS,
    **torch_repairs_indexing.REPAIRS,
    **torch_repairs_reductions.REPAIRS,
    **torch_repairs_resampling.REPAIRS,
}

_RANDOM = (
    "randn.default", "randn_like.default", "rand.default", "rand_like.default", "randint.low", "randint_like.default",
    "randperm.default", "bernoulli.p", "bernoulli.default", "exponential.default", "normal.Tensor_float",
    "multinomial.default", "native_dropout.default", "dropout.default",
)  # fmt: skip
"""TVM's importer computes them once, or leaves them out, without a word."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(_RANDOM, RANDOM),
    **dict.fromkeys(("masked_select.default", "nonzero.default", "unique_dim.default", "_unique2.default"), DYNAMIC),
    "cond": BRANCH,
    "while_loop": LOOP,
}
"""Operator name to the reason."""
