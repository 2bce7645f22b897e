"""What replaces TVM's import of torch's operators, by family."""
