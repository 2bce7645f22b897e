"""Copy workers to machines over ssh, start them there, and end them."""
