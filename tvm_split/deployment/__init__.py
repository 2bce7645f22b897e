"""Run a bundle on a cluster, and compare its measurements with its prediction."""
