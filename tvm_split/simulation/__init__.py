"""A plan at work without machines: the runtime's own rules over time that is made up."""
