"""Import StableHLO, the exchange format of JAX and TensorFlow, as Relax."""
