"""Operators along an axis on which their tensors are split: what a part of a result needs, and how it is computed."""
