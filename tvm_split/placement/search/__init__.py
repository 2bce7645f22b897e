"""Search for the best plan of a `tvm_split.placement.problem.Problem`, with a lower bound; numbers only, no TVM."""

from tvm_split.placement.search.budget import Budget
from tvm_split.placement.search.search import solve

__all__ = ["Budget", "solve"]
