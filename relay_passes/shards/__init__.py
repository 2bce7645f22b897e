"""Splits inside a layer: what several machines compute together on one input, as ordinary operations of the graph."""
