"""A page that shows what a deployment does: served while it runs, or written into one file."""
