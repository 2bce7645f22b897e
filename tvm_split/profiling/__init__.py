"""Measures a model's pieces on each machine, and transfers between machines; keeps the times between runs."""
