"""Kinds of clusters: each finds machines, and starts workers on them where they do not run already."""
