"""What each piece of a model takes on each machine, measured there with the kernels that would run."""
