"""Launchers, one per kind of cluster: each finds machines, and starts their workers if they do not run already."""
