"""Decide which layers run on which machine: from measurements to a plan and a lower bound. See `tvm_split.plan`."""
