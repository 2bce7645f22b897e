"""Plans in which machines compute layers together: which are considered, and whether one is worth it."""
