"""One small kind of everything that an installed package can add to tvm-split."""
