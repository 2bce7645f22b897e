"""Which layers run on which machine: plans by hand, by a rule, and by a search over measured costs.

Nothing is imported here, so that the search, which is numbers only, starts without TVM.
"""
