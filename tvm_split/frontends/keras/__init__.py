"""Models of Keras, through JAX or torch."""
