"""Compile a plan into a bundle: place operations, build stages for their targets, and verify the results."""
