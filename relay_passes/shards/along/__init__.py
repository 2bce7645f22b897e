"""Rules for operators whose tensors are split along an axis: what a part of a result reads, and how it is computed."""
