"""Simulate a running plan without machines: the runtime's own scheduling rules in simulated time."""
