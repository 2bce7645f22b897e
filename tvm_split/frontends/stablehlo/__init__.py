"""StableHLO, the form in which JAX and TensorFlow write networks, to Relax: one file for each group of operators."""
