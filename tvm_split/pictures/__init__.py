"""Draw plans and timelines as pictures."""
