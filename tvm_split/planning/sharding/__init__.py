"""Search for plans in which several machines compute a layer together: options, estimates, measured parts."""
