"""How tensors get from machine to machine: the two ends of a link, and what carries its frames."""
