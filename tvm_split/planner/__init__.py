"""Which layers run on which machine: measurements in, the best plan and its proof out. `tvm_split.plan` drives it."""
