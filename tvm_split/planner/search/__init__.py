"""Search for the best plan of a `tvm_split.planner.problem.Problem`, with a lower bound; uses numbers only, no TVM."""

from tvm_split.planner.search.budget import Budget
from tvm_split.planner.search.search import solve

__all__ = ["Budget", "solve"]
