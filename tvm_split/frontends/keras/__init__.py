"""Import models of Keras through JAX or torch."""
