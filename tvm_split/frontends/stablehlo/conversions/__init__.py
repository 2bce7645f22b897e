"""Convert operations of StableHLO to operators of Relax; one module per family."""
