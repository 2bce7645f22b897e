"""Links that send tensors between machines: their two ends, and the transports that carry their frames."""
