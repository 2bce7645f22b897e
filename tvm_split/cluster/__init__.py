"""Machines and the links between them, from code or from a file."""
