"""Intra-layer splits: several machines compute one layer on the same input, as ordinary operations of the graph."""
