"""Functions of JAX, modules of Flax, and StableHLO files."""
