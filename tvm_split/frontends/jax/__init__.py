"""Import functions of JAX, modules of Flax, and StableHLO files."""
