"""Plans and timelines as pictures."""
