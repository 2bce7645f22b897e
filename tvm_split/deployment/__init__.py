"""A bundle that runs, and what it did beside what was predicted of it."""
