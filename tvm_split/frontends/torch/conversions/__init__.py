"""Conversions that replace TVM's import of torch's operators; one module per family."""
