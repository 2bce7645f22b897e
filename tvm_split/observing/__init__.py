"""Show what a deployment does: traces, and what follows from them."""
